"""RollMux's micro-benchmarks in both modes: the simulated round-robin, and the real scheduler, permits, proxies, engines and trainers."""

from pathlib import Path
from statistics import fmean

import pytest

from rubato.planning.coexecution import JobProfile, SharedCluster
from rubato.planning.consolidation import RolloutTail
from rubato.sim.live.shared import alone, shared
from rubato.sim.rollmux.micro import cost_ratio, placed, profiles
from rubato.sim.rollmux.multiplexed import certain_rates
from rubato.sim.scenario import load

MICRO = load(Path(__file__).parents[2] / "configs" / "sim" / "rollmux_micro.yaml").scenario
SCALE = 0.01
"""Every duration is multiplied by it: virtual seconds cost heartbeats."""


def cluster() -> SharedCluster:
    made = MICRO.pools.cluster()
    pools = (pool._replace(switch_s=SCALE * pool.switch_s) for pool in (made.rollout, made.train))
    return SharedCluster(*pools, made.residents)


def case(name: str) -> list[JobProfile]:
    """`environments` is *two* with resets that are 30 % of a step. A pool of one engine has no tail."""
    found = next(each for each in MICRO.cases if each.name == ("two" if name == "environments" else name))
    jobs = profiles(MICRO, found)
    resets = 0.3 / 0.7 if name == "environments" else 0.0
    return [
        job._replace(
            rollout_s=SCALE * job.rollout_s,
            train_s=SCALE * job.train_s,
            environment_s=resets * SCALE * (job.rollout_s + job.train_s),
            tail=RolloutTail(),
        )
        for job in jobs
    ]


@pytest.mark.parametrize("name", ["two", "three", "environments"])
def test_the_real_scheduler_and_permits_agree_with_the_simulated_round_robin_within_3_percent(name, tmp_path):
    jobs, pools = case(name), cluster()
    (group,) = placed(jobs, pools)
    slowdown = certain_rates(pools)(group)
    modelled = {job.name: slowdown[job.name] * sum(job.longest) for job in jobs}
    efficiency = cost_ratio([group], pools) * fmean(1 / each for each in slowdown.values())

    live = shared(jobs, pools, tmp_path)
    own = {steps: alone(job, tmp_path / job.name) for steps, job in {job.longest: job for job in jobs}.items()}

    found = cost_ratio(live.groups, pools) * fmean(own[job.longest] / live.step_s[job.name] for job in jobs)
    off = {name: f"{live.step_s[name] / modelled[name] - 1:+.2%}" for name in modelled}
    print(f"{name}: efficiency {efficiency:.3f} modelled, {found:.3f} by real actors; steps {off}")
    assert [(each.nodes, len(each.jobs)) for each in live.groups] == [(group.nodes, len(group.jobs))]
    assert live.step_s == pytest.approx(modelled, rel=0.03)
    assert found == pytest.approx(efficiency, rel=0.03)


def test_a_job_of_several_nodes_is_refused(tmp_path):
    with pytest.raises(ValueError, match="job c-1 needs 2 rollout nodes: a live job has one of each pool"):
        shared(case("spatial"), cluster(), tmp_path)
