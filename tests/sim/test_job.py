"""A modelled job keeps what the live one promises, and is the same twice."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import yaml

from rubato.planning.roofline import Roofline
from rubato.sim.cluster import ClusterJobSpec, PoolSpec, cluster_job, engines_of, manager_of
from rubato.sim.engine_model import ModelledEngine
from rubato.sim.job import Job
from rubato.sim.manager_model import TurnRequest
from rubato.sim.proxy_model import ModelledProxy
from rubato.sim.rollart.batch import BatchRun
from rubato.sim.timeline import Timeline
from rubato.sim.workload import TaskSpec, episode

CONFIGS = Path(__file__).parents[2] / "configs"


def part(name: str) -> dict:
    return yaml.safe_load((CONFIGS / name).read_text())


def engine(**changes) -> dict:
    return {"gpu": part("hardware/h800.yaml"), "model": part("models/qwen3-8b.yaml"), **changes}


def pools(count: int = 2, **changes) -> tuple[PoolSpec, ...]:
    return (PoolSpec.model_validate({"name": "h800", "count": count, "engine": engine(**changes)}),)


def job(**changes) -> Job:
    spec = {
        "pools": pools(), "trainer": {**engine(), "gpus": 2}, "tasks": [part("workloads/gem_math.yaml")],
        "weights": {"push_bytes_s": 1e10, "pull_bytes_s": 1e10, "load_bytes_s": 2e10},
        "batch_groups": 3, "group_size": 2, "environments": 8, "steps": 6,
    }  # fmt: skip
    return cluster_job(ClusterJobSpec.model_validate(spec | changes), seed=1)


@pytest.mark.parametrize("alpha", [0, 1, 3])
def test_no_trained_trajectory_is_older_than_the_bound(alpha):
    simulated = job(alpha=alpha)

    simulated.run()

    assert [row.step for row in simulated.rows] == [1, 2, 3, 4, 5, 6]
    assert len(simulated.buffer.ages) == 6 * 3 * 2
    assert max(simulated.buffer.ages) <= alpha


def test_a_looser_bound_lets_rollouts_run_beside_training():
    tight, loose = job(alpha=0), job(alpha=2)

    tight.run()
    loose.run()

    assert loose.rows[-1].published_s < tight.rows[-1].published_s


def test_stragglers_that_are_dropped_give_back_their_places_and_the_bound_holds():
    waits, drops = job(alpha=1, steps=30, environments=12), job(alpha=1, steps=30, environments=12, stragglers="drop")

    waits.run()
    drops.run()

    assert "stale" not in waits.buffer.fates
    assert drops.buffer.fates["cancelled"] > 0
    assert max(drops.buffer.ages) <= 1
    assert drops.rows[-1].published_s < waits.rows[-1].published_s
    with pytest.raises(ValueError, match="move_every_s nor stragglers=drop"):
        job(pools=[{**pools()[0].model_dump(), "serves": stage, "name": stage} for stage in ("prefill", "decode")], stragglers="drop")


def test_alpha_of_a_job_may_adapt_within_bounds():
    simulated = job(alpha="auto", alpha_min=1, alpha_max=2, steps=40, drift=0.05)

    simulated.run()

    assert [alpha for _, alpha, _ in simulated.buffer.alphas][:1] == [2]
    assert max(simulated.buffer.ages) == 2
    with pytest.raises(ValueError, match="α can't be at least 3 and at most 2"):
        job(alpha="auto", alpha_min=3, alpha_max=2)


def test_the_trainer_goes_on_while_weights_are_pushed_and_waits_only_for_the_push_before():
    slow = job(alpha=3, weights={"push_bytes_s": 1e9, "pull_bytes_s": 1e10, "load_bytes_s": 2e10})  # 16 s

    slow.run()

    first, second = slow.rows[:2]
    assert first.published_s == first.trained_s
    assert second.published_s >= first.published_s + 16.0


def test_rollouts_that_fail_shrink_their_groups_and_the_job_goes_on():
    failing = part("workloads/gem_math.yaml") | {
        "reset_failure": {"probability": 0.6, "hang_s": 10}, "reward_failure": 0.1,
        "reward_s": {"law": "uniform", "low": 0.1, "high": 2.0},
    }  # fmt: skip
    simulated = job(alpha=1, tasks=[failing], group_size=4)

    simulated.run()

    fates = simulated.buffer.fates
    assert len(simulated.rows) == 6
    assert fates["env_reset_failed"] > 5
    assert fates["reward_failed"] > 0
    assert 6 * 3 * 2 <= len(simulated.buffer.ages) < 6 * 3 * 4


def test_the_same_seed_gives_the_same_job():
    first, second = job(alpha=1), job(alpha=1)

    first.run()
    second.run()

    assert first.rows == second.rows


def test_a_job_can_be_left_in_its_middle():
    simulated = job(alpha=1, steps=1000)

    simulated.run(steps=3)

    assert len(simulated.rows) == 3


def test_a_trajectory_keeps_its_engine_and_its_kv():
    timeline = Timeline()
    engines = engines_of(timeline, pools(count=4))
    proxy = ModelledProxy(timeline, engines)

    async def turns() -> None:
        for context in (1000, 1100, 1200):
            await proxy.generate(TurnRequest("t0"), context, 50)

    timeline.start(turns())
    timeline.run()

    assert sorted(served.usage.prefilled for served in engines) == [0, 0, 0, 1000 + 50 + 50]


def test_whoever_finds_every_engine_full_waits_its_turn():
    timeline = Timeline()
    engines = engines_of(timeline, pools(count=1, num_slots=2))
    proxy = ModelledProxy(timeline, engines)
    ended: list[str] = []

    async def asks(name: str) -> None:
        await proxy.generate(TurnRequest(name), 100, 20)
        ended.append(name)

    for name in "abcdefgh":
        timeline.start(asks(name))
    timeline.run()

    assert ended == list("abcdefgh")


def test_a_rollout_begins_under_older_weights_where_it_does_not_await_its_tickets_version():
    task = TaskSpec.model_validate(part("workloads/frozen_lake.yaml"))
    first: dict[bool, int] = {}
    for awaits in (True, False):
        timeline = Timeline()
        (engine,) = engines = engines_of(timeline, pools(1))
        manager = replace(manager_of(timeline, engines), awaits_version=awaits)
        playing = timeline.start(manager.play("t0", episode(task, 1, "t0"), min_version=3))
        timeline.at(0.001, partial(engine.resume, 3))
        timeline.run(until=playing.ended)
        first[awaits] = playing.ended.value.version_first

    assert first == {True: 3, False: 0}


def test_lock_step_waits_for_the_slowest_score_at_its_end():
    task = TaskSpec.model_validate(part("workloads/frozen_lake.yaml"))
    plain = [episode(task, 1, f"t{number}") for number in range(4)]
    scored = [each._replace(reward_s=float(number)) for number, each in enumerate(plain)]

    done = BatchRun(pools(4)).lock_step(scored)

    assert done.seconds == pytest.approx(BatchRun(pools(4)).lock_step(plain).seconds + 3.0)
    assert done.played[0].score_s == 3.0


def test_lock_step_is_never_faster_and_is_the_same_where_nothing_varies():
    still = TaskSpec.model_validate({**part("workloads/frozen_lake.yaml"), "step_s": {"law": "constant", "value": 1}})
    same = [episode(still, 1, "t")] * 4
    various = [episode(still, 1, f"t{number}") for number in range(4)]

    assert BatchRun(pools(4)).lock_step(same).seconds == pytest.approx(BatchRun(pools(4)).trajectories(same).seconds)
    assert BatchRun(pools(4)).lock_step(various).seconds > BatchRun(pools(4)).trajectories(various).seconds


def test_a_batch_that_has_enough_ends_before_its_slowest():
    math = TaskSpec.model_validate(part("workloads/gem_math.yaml"))
    episodes = [episode(math, 1, f"t{number}") for number in range(20)]

    enough = BatchRun(pools()).trajectories(episodes, enough=15)

    assert len(enough.played) == 15
    assert enough.seconds < BatchRun(pools()).trajectories(episodes).seconds


def test_an_engine_that_waits_for_weights_is_no_hindrance_to_the_job():
    timeline = Timeline()
    served = ModelledEngine(timeline, "engine-0", Roofline(pools()[0].engine))
    proxy = ModelledProxy(timeline, [served])
    asked = timeline.start(proxy.generate(TurnRequest("t0", min_version=1), 100, 10))

    timeline.run()
    assert not asked.ended.happened

    served.resume(version=1)
    timeline.run()
    assert asked.ended.value == 1
