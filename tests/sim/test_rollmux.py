"""RollMux's scenarios: a run is the same twice, jobs pay for their nodes while they run, and the optimum is what brute force finds."""

from itertools import combinations, pairwise, product
from pathlib import Path
from random import Random

import pytest

from rubato.planning.coexecution import CoexecutionGroup, JobProfile, NodePool, PinnedJob, SharedCluster, keeps
from rubato.runtime.errors import ConfigError
from rubato.sim.outcome import silent
from rubato.sim.rollmux import optimum
from rubato.sim.rollmux.multiplexed import Arrival, MultiplexedRun
from rubato.sim.rollmux.optimum import Optimum
from rubato.sim.rollmux.policies import Alone, MostIdle, Planned, RandomGroup, Regrouped, roomy
from rubato.sim.rollmux.tail import PairRun
from rubato.sim.rollmux.trace import made
from rubato.sim.scenario import load

SCENARIOS = Path(__file__).parents[2] / "configs" / "sim"
CLUSTER = SharedCluster(NodePool(8 * 1.85, 2e12), NodePool(8 * 5.28, 2e12))
PAIR = 8 * (1.85 + 5.28)
HOUR_S = 3600.0
SMALL = {
    "chance": ["trace.jobs=12", "setting.jobs=12", "epsilons=[0.1]", "responses=16"],
    "micro": [],
    "philly": ["settings=[{name: mixed, shapes: [balanced], slo: {law: uniform, low: 1, high: 2}, jobs: 12}]"],
    "tail": ["prompts=32", "steps=3", "sensitivity=[2]"],
    "trace": ["held.points=[[0, 4], [9, 6], [20, 3], [30, 5], [40, 0]]", "jobs=7"],
}


@pytest.mark.parametrize("name", SMALL)
def test_a_run_is_the_same_twice(name):
    loaded = load(SCENARIOS / f"rollmux_{name}.yaml", SMALL[name])

    first, second = loaded.kind.run(loaded.scenario, silent), loaded.kind.run(loaded.scenario, silent)

    assert first.figures == second.figures
    assert first.tables == second.tables


@pytest.mark.parametrize("name", SMALL)
def test_at_most_half_of_the_claims_are_expected_to_fail(name):
    claims = load(SCENARIOS / f"rollmux_{name}.yaml").scenario.claims

    assert sum(claim.expected == "fails" for claim in claims) <= len(claims) / 2


def job(name, rollout_s=100.0, train_s=100.0, slo=1.5, **rest):
    return JobProfile(name, rollout_s, train_s, *rest.pop("nodes", (1, 1)), 300e9, 300e9, slo, **rest)


def at_once(*jobs, hours=10.0):
    return [Arrival(0.0, hours * HOUR_S, each) for each in jobs]


def test_two_alike_pay_for_one_pair_of_nodes_and_alone_for_two():
    jobs = at_once(job("a"), job("b"))

    shared = MultiplexedRun(jobs, Planned(CLUSTER), CLUSTER).run()
    alone = MultiplexedRun(jobs, Alone(CLUSTER), CLUSTER).run()

    assert shared.usd == pytest.approx(10 * PAIR)
    assert alone.usd == pytest.approx(20 * PAIR)
    assert shared.slowdown == pytest.approx({"a": 1.0, "b": 1.0})
    assert (shared.rollout_nodes, shared.train_nodes, shared.attained) == (1.0, 1.0, 1.0)


def test_whoever_is_slowed_pays_for_longer_and_misses_its_bound():
    """Two rollouts of 200 s share a node: a step of each takes 400 s, alone 250 s."""
    jobs = at_once(job("a", 200, 50), job("b", 200, 50))

    found = MultiplexedRun(jobs, MostIdle(CLUSTER), CLUSTER).run()

    assert found.slowdown == pytest.approx({"a": 1.6, "b": 1.6})
    assert found.usd == pytest.approx(16 * PAIR)
    assert found.attained == 0.0
    assert MultiplexedRun(jobs, Planned(CLUSTER), CLUSTER).run().attained == 1.0


def test_who_stays_behind_goes_on_at_its_own_pace():
    jobs = [Arrival(0.0, 10 * HOUR_S, job("a", 200, 50)), Arrival(0.0, 5 * HOUR_S, job("b", 200, 50))]

    found = MultiplexedRun(jobs, MostIdle(CLUSTER), CLUSTER).run()

    assert found.slowdown == pytest.approx({"a": (8 + 5) / 10, "b": 1.6})


def test_a_move_costs_its_cold_start():
    """b and d leave a and c on two pairs of nodes; one of the two moves, once."""
    names = dict.fromkeys("abcd", 10.0) | {"b": 1.0, "d": 1.0}
    jobs = [Arrival(0.0, hours * HOUR_S, job(name, cold_s=360.0)) for name, hours in names.items()]

    found = MultiplexedRun(jobs, Regrouped(CLUSTER), CLUSTER).run()

    assert sorted(found.slowdown.values()) == pytest.approx([1.0, 1.0, 1.0, 1.01])
    assert found.usd == pytest.approx((2 * 1 + 9.1) * PAIR, rel=0.01)
    assert found.usd < MultiplexedRun(jobs, Planned(CLUSTER), CLUSTER).run().usd


def test_random_is_the_same_for_the_same_seed_and_keeps_memory_and_residents():
    jobs = at_once(*(job(f"j{at}", 50 + at, 100 - at) for at in range(12)))
    two = CLUSTER._replace(residents=2)

    def run(seed):
        return MultiplexedRun(jobs, RandomGroup(two, seed), two).run()

    assert run(1) == run(1)
    assert len({run(seed).usd for seed in range(4)}) > 1
    full = CoexecutionGroup(0, (0,), 1, tuple(PinnedJob(each.job, (0,)) for each in jobs[:2]))
    assert roomy((full,), job("late"), two) == []
    assert roomy((full,), job("late")._replace(rollout_bytes=1.9e12), CLUSTER) == []


def by_hand(jobs):
    """Every partition, every pool, every placement of one-node jobs."""
    if not jobs:
        return 0.0
    first, *others = jobs
    best = float("inf")
    for taken in product((False, True), repeat=len(others)):
        block = [first, *(each for each, own in zip(others, taken, strict=True) if own)]
        rest = [each for each, own in zip(others, taken, strict=True) if not own]
        best = min(best, cheapest(block) + by_hand(rest))
    return best


def cheapest(block):
    found = float("inf")
    for pool in {each.train_nodes for each in block}:
        for nodes in product(range(len(block)), repeat=len(block)):
            if sorted(set(nodes)) == list(range(len(set(nodes)))):
                pinned = tuple(PinnedJob(each, (node,)) for each, node in zip(block, nodes, strict=True))
                group = CoexecutionGroup(0, tuple(sorted(set(nodes))), pool, pinned)
                if group.usd_hour(CLUSTER) < found and whoever_leaves(group):
                    found = group.usd_hour(CLUSTER)
    return found


def whoever_leaves(group):
    """The planner demands it: first come first served may slow two whom a third keeps apart."""
    return all(
        keeps(group._replace(jobs=jobs), CLUSTER) is not None
        for num in range(2, len(group.jobs) + 1)
        for jobs in combinations(group.jobs, num)
    )


@pytest.mark.parametrize("seed", range(6))
def test_the_optimum_is_what_brute_force_finds(seed):
    chance = Random(seed)
    jobs = [
        job(f"j{at}", chance.uniform(50, 300), chance.uniform(50, 300), chance.uniform(1, 2), nodes=(1, chance.choice((1, 2))))
        for at in range(5)
    ]
    policy = Optimum(CLUSTER)
    groups = ()
    for each in jobs:
        groups = policy.arrived(groups, each, {})

    found = policy.partitions[-1]
    assert found.exact
    assert found.usd_hour == pytest.approx(by_hand(jobs))
    assert sorted(p.job.name for g in groups for p in g.jobs) == sorted(each.name for each in jobs)
    assert all(len(group.jobs) == 1 or keeps(group, CLUSTER) is not None for group in groups)


def test_where_the_search_ends_early_a_lower_bound_stands_for_the_optimum(monkeypatch):
    chance = Random(1)
    jobs = [job(f"j{at}", chance.uniform(50, 300), chance.uniform(50, 300), 1.6) for at in range(9)]

    def found():
        policy = Optimum(CLUSTER)
        for each in jobs:
            policy.arrived((), each, {})
        return policy.partitions[-1]

    exact = found()
    monkeypatch.setattr(optimum, "MOST_LOOKS", 12)
    early = found()

    assert exact.exact
    assert not early.exact
    assert early.bound_usd_hour <= exact.usd_hour <= early.usd_hour + 1e-6


def test_the_jobs_of_the_trace_hold_the_digitised_nodes_alone():
    scenario = load(SCENARIOS / "rollmux_trace.yaml").scenario

    jobs = made(scenario)

    assert len(jobs) == 200
    points = scenario.held.points
    held = [sum(j.job.train_nodes for j in jobs if j.at_s <= hour * HOUR_S < j.at_s + j.work_s) for hour, _ in points]
    off = [abs(own - nodes) for own, (_, nodes) in zip(held, points, strict=True)]
    assert max(off) <= 2  # a job of two nodes ends where the curve falls by one
    assert sum(off) < 0.05 * sum(nodes for _, nodes in points)


def test_a_trace_with_more_jobs_than_nodes_is_refused_in_a_sentence():
    loaded = load(SCENARIOS / "rollmux_trace.yaml", ["jobs=2000"])

    with pytest.raises(ValueError, match=r"the curve has room for \d+ to \d+ jobs, not for 2000"):
        loaded.kind.run(loaded.scenario, silent)
    with pytest.raises(ConfigError, match="points must be in order of time and end with no node"):
        load(SCENARIOS / "rollmux_trace.yaml", ["held.points=[[0, 1], [1, 2]]"])


def test_the_next_rollout_starts_beside_the_tail_and_no_response_is_lost():
    scenario = load(SCENARIOS / "rollmux_tail.yaml", ["prompts=64", "steps=3"]).scenario

    plain, moved = (PairRun(scenario, ("7b_8k", "7b_8k"), share) for share in (1.0, 0.8))
    plain_s, moved_s = plain.run(), moved.run()

    assert sum(moved_s) < sum(plain_s)
    tails = [span for span in moved.spans if span.name.endswith("tail")]
    rollouts = [span for span in moved.spans if span.name.endswith("rollout")]
    assert tails[0].start_s + tails[0].duration_s > min(each.start_s for each in rollouts[1:])
    assert not [span for span in plain.spans if span.name.endswith("tail")]
    busy = sorted((each.start_s, each.start_s + each.duration_s) for each in plain.spans if each.lane == "rollout node")
    assert all(after[0] >= before[1] - 1e-9 for before, after in pairwise(busy))
    updates = sorted((u.start_s, u.start_s + u.duration_s) for u in moved.spans if u.lane == "training node")
    assert all(after[0] >= before[1] - 1e-9 for before, after in pairwise(updates))
