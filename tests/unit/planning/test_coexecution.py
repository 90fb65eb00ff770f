"""Groups of jobs: who is packed where, at what cost, and why."""

import math
from pathlib import Path

import pytest

from rubato.planning.coexecution import (
    EFFICIENCY,
    CoexecutionGroup,
    JobProfile,
    NodePool,
    PinnedJob,
    SharedCluster,
    admit,
    depart,
    keeps,
    place,
    saturated,
)
from rubato.planning.consolidation import RolloutTail
from rubato.planning.regrouping import regroup, settled
from rubato.planning.round_robin import PhasedJob, StepTimes, meta_iteration_s, slowdowns

ROOT = Path(__file__).resolve().parents[3]
GB = 1e9
H20, H800 = 8 * 1.85, 8 * 5.28
CLUSTER = SharedCluster(NodePool(H20, 1000 * GB, cores=64), NodePool(H800, 1000 * GB))


SLO = 1.3


def job(name, rollout_s=100.0, train_s=100.0, slo=1.5, **rest):
    return JobProfile(name, rollout_s, train_s, *(rest.pop("nodes", (1, 1))), 100 * GB, 100 * GB, slo, **rest)


def grouped(*jobs, cluster=CLUSTER):
    groups = ()
    for each in jobs:
        groups = admit(groups, each, place(each, groups, cluster))
    return groups


def names(groups):
    return [[pinned.job.name for pinned in group.jobs] for group in groups]


def test_the_first_job_has_a_group_of_its_own_at_the_price_of_its_nodes():
    found = place(job("a"), (), CLUSTER)

    assert found.usd_hour == pytest.approx(H20 + H800)
    assert found.slowdown == {"a": 1.0}
    assert found.why == "job a has group 0 to itself for 57.04 $/h: there is no other"


def test_two_alike_share_both_pools_for_nothing_and_slow_nobody():
    groups = grouped(job("a", slo=1.0))

    found = place(job("b", slo=1.0), groups, CLUSTER)

    assert (found.group, found.nodes, found.usd_hour) == (0, (0,), 0.0)
    assert found.slowdown == pytest.approx({"a": 1.0, "b": 1.0})
    assert found.why.startswith("job b shares group 0 with a: no new node, 0.00 $/h more; nearest to its bound is ")


def test_a_group_whose_load_fills_its_longest_jobs_time_takes_nobody():
    full = grouped(job("a"), job("b"))

    assert saturated(full[0], CLUSTER)
    found = place(job("c", slo=9.0), full, CLUSTER)
    assert found.group == 1
    assert "of 1 groups 1 are saturated, 0 full, and 0 lack memory or would miss a bound" in found.why


def test_rollout_heavy_jobs_share_a_training_pool_and_have_a_rollout_node_each():
    """Case (b) of the paper: two jobs of 315 and 126 s and one of 860 and 143 s on three rollout nodes and a training node."""
    groups = grouped(job("e", 860, 143, slo=SLO), job("d1", 315, 126, slo=SLO), job("d2", 315, 126, slo=SLO))

    assert names(groups) == [["e", "d1", "d2"]]
    assert (len(groups[0].nodes), groups[0].train_nodes) == (3, 1)
    assert [pinned.nodes for pinned in groups[0].jobs] == [(0,), (1,), (2,)]


def test_where_new_rollout_nodes_are_needed_no_more_are_added_than_that():
    groups = grouped(job("a", 300, 50, slo=1.1, nodes=(2, 1)))

    found = place(job("b", 300, 50, slo=1.1, nodes=(2, 1)), groups, CLUSTER)

    assert found.nodes == (2, 3)
    assert found.usd_hour == pytest.approx(2 * H20)


def test_states_that_do_not_fit_beside_the_others_keep_a_job_out():
    small = CLUSTER._replace(train=NodePool(H800, 150 * GB))

    assert place(job("b"), grouped(job("a")), small).group == 1


def test_states_of_a_larger_job_take_more_of_each_node_of_a_smaller_pool():
    small = CLUSTER._replace(train=NodePool(H800, 250 * GB))
    groups = grouped(job("a", 100, 25, slo=9.0))

    assert place(job("b", 50, 12, slo=9.0), groups, small).group == 0
    assert place(job("b", 50, 12, slo=9.0, nodes=(1, 2)), groups, small).group == 1


def test_an_update_on_a_smaller_pool_takes_longer_and_on_a_larger_one_less():
    """Alone the rollouts of 100 s and updates of 100 s fill a pool to three quarters; on half the pool updates take 200 s."""
    beside = place(job("b", slo=9.0, nodes=(1, 2)), grouped(job("a", slo=9.0)), CLUSTER)
    within = place(job("b", slo=9.0), grouped(job("a", slo=9.0, nodes=(1, 2))), CLUSTER)

    assert beside.slowdown["b"] == pytest.approx(1.5)
    assert within.slowdown["b"] == pytest.approx(1.0)
    assert EFFICIENCY < 1


def test_environments_that_want_the_same_cores_wait_for_each_other():
    cores = CLUSTER._replace(rollout=CLUSTER.rollout._replace(cores=64))
    held = grouped(job("a", 95, 95, slo=9.0, environment_s=110.0, cores=60.0), cluster=cores)
    greedy = job("b", 40, 40, slo=1.05, environment_s=220.0, cores=64.0)

    found = place(greedy, held, cores)
    assert found.nodes == (1,)  # a second node brings the cores
    assert found.slowdown["b"] <= 1.05
    light = place(greedy._replace(cores=1.0, slo=9.0), held, cores)
    assert light.nodes == (0,)
    assert light.slowdown["b"] < place(greedy._replace(slo=9.0), held, cores).slowdown["b"]


def test_a_group_whose_cores_are_busy_all_the_time_is_saturated():
    one = grouped(job("a", 50, 50, environment_s=200.0, cores=64.0))[0]
    twice = one._replace(jobs=(*one.jobs, one.jobs[0]._replace(job=one.jobs[0].job._replace(name="b"))))

    assert not saturated(one, CLUSTER)
    assert saturated(twice, CLUSTER)


def test_what_jobs_were_seen_to_take_admits_more_than_their_longest_responses():
    """Its longest responses would take twelve times as long as those it was seen to have."""
    seen = tuple(StepTimes(0.0, 45.0 + i, 50.0) for i in range(10))
    capped, other = job("capped", 600, 60, slo=1.2, seen=seen), job("other", 50, 50, slo=1.5)

    assert place(capped, grouped(other), CLUSTER).usd_hour > 0
    by_chance = place(capped, grouped(other), CLUSTER._replace(epsilon=0.05))
    assert (by_chance.group, by_chance.usd_hour) == (0, 0.0)


def test_a_job_whose_steps_scatter_too_far_for_its_bound_stays_alone_at_a_small_epsilon():
    even = tuple(StepTimes(0.0, 100.0, 100.0) for _ in range(20))
    wide = tuple(StepTimes(0.0, 20.0 if i % 2 else 180.0, 180.0 if i % 2 else 20.0) for i in range(20))
    steady, scattered = job("a", 200, 200, slo=1.1, seen=even), job("b", 200, 200, slo=1.1, seen=wide)

    assert len(grouped(steady, steady._replace(name="c"), cluster=CLUSTER._replace(epsilon=0.05))) == 1
    assert len(grouped(steady, scattered, cluster=CLUSTER._replace(epsilon=0.05))) == 2


def test_the_slowest_stretch_is_held_against_the_slowest_alone():
    """Steps of 2 s and of 20 s by turns take 6 s and 24 s beside a job of 10 s: three times the short one, 1.2 times the long one."""
    own = [StepTimes(0.0, each / 2, each / 2) for each in (2.0, 20.0)]
    jobs = [PhasedJob(own, [2.0, 20.0], (0,)), PhasedJob([StepTimes(0.0, 5.0, 5.0)], [10.0], (0,))]

    found = slowdowns(jobs, 0.0, 8, [1.2, math.inf], window=1)

    assert found is not None
    assert set(found[0]) == {1.2, 3.0}
    assert slowdowns(jobs, 0.0, 8, [1.19, math.inf], window=1) is None


def test_on_average_each_job_keeps_its_bound_where_its_longest_steps_would_allow_more():
    """One step in eight takes four times as long: against that one a slowdown of two for the others would pass."""
    rare = tuple(StepTimes(0.0, 40.0 if i % 8 == 0 else 10.0, 40.0 if i % 8 == 0 else 10.0) for i in range(16))
    first, second = job("a", 40, 40, slo=1.2, seen=rare), job("b", 40, 40, slo=1.2, seen=rare)

    groups = grouped(first, second, cluster=CLUSTER._replace(epsilon=0.05))

    assert len(groups) == 2


def test_a_job_that_would_miss_its_bound_once_another_leaves_is_kept_out():
    """First come first served: beside b, a and c are served in a better order than by themselves."""
    jobs = job("a", 140, 170, slo=1.5), job("b", 290, 150, slo=1.3), job("c", 160, 40, slo=1.1)
    together = CoexecutionGroup(0, (0, 1), 1, tuple(map(PinnedJob, jobs, ((0,), (0,), (1,)))))

    assert keeps(together, CLUSTER) is not None
    assert keeps(depart([together], "b")[0], CLUSTER) is None
    assert names(grouped(*jobs)) == [["a", "b"], ["c"]]


def test_what_a_decision_looks_at_grows_with_the_number_of_groups_alone(monkeypatch):
    looks = []

    def counted(*args, **rest):
        looks.append(1)
        return slowdowns(*args, **rest)

    monkeypatch.setattr("rubato.planning.coexecution.slowdowns", counted)
    seen = tuple(StepTimes(0.0, 200.0 if i % 2 else 20.0, 20.0) for i in range(16))
    held = [job(f"a{i}", 200, 20, slo=1.0, seen=seen) for i in range(64)]
    alone = [CoexecutionGroup(i, (0,), 1, (PinnedJob(each, (0,)),)) for i, each in enumerate(held)]

    def count(num, epsilon):
        looks.clear()
        place(job("b", 150, 15, slo=1.0, seen=seen), alone[:num], CLUSTER._replace(epsilon=epsilon))
        return len(looks)

    for epsilon in (0.0, 0.05):
        few, many = count(16, epsilon), count(64, epsilon)
        assert many <= 4 * few
        assert many <= 64 * 2 * 3  # two node counts per group, and two looks where steps scatter


def test_switching_counts_against_the_bound():
    slow = CLUSTER._replace(rollout=CLUSTER.rollout._replace(switch_s=30.0))

    assert len(grouped(job("a", slo=1.1), job("b", slo=1.1), cluster=slow)) == 2


def test_a_job_waits_where_nothing_is_free():
    tiny = SharedCluster(NodePool(H20, 1000 * GB, 1), NodePool(H800, 1000 * GB, 1))
    groups = grouped(job("a"), job("b"), cluster=tiny)

    found = place(job("c"), groups, tiny)

    assert found.group is None
    assert found.why == ("job c waits: no group has room, and 0 rollout and 0 training nodes are free of the 1 and 1 that it needs")
    assert admit(groups, job("c"), found) == groups


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (job("a", slo=0.9), "job a has an SLO of 0.9: it must be at least 1, its time alone"),
        (job("a", nodes=(9, 1)), "job a needs 9 rollout nodes, and the cluster has 4"),
        (job("a", nodes=(1, 9)), "job a needs 9 training nodes, and the cluster has 4"),
        (job("a")._replace(rollout_bytes=2e12), "needs 2000.0 GB of host memory on a rollout node, which has 1000.0"),
        (job("a", cores=65.0), "job a's environments need 65 cores, and its rollout nodes have 64"),
        (job("a", rollout_s=0.0), "job a needs at least a rollout node and a training node, and phases above 0 s"),
    ],
)
def test_what_can_never_run_is_refused_in_a_sentence(wrong, says):
    four = SharedCluster(CLUSTER.rollout._replace(nodes=4), CLUSTER.train._replace(nodes=4))

    with pytest.raises(ValueError, match=says):
        place(wrong, (), four)


def test_nodes_that_nobody_is_pinned_to_are_released():
    groups = grouped(job("e", 860, 143, slo=SLO), job("d1", 315, 126, slo=SLO), job("d2", 315, 126, slo=SLO))

    without = depart(groups, "d1")

    assert [group.nodes for group in without] == [(0, 2)]
    assert keeps(without[0], CLUSTER) is not None
    assert depart(depart(without, "e"), "d2") == ()


HOURS = {"a": 36000.0, "b": 36000.0, "c": 36000.0, "d": 36000.0}


def two_halves():
    """Two groups of two, each of which has lost a job."""
    groups = grouped(*(job(name) for name in "abcd"))
    assert names(groups) == [["a", "b"], ["c", "d"]]
    return depart(depart(groups, "b"), "d")


def test_what_departures_leave_is_put_together_where_that_pays():
    found = regroup(two_halves(), 1, HOURS, CLUSTER)

    assert names(found.groups) == [["a", "c"]] or names(found.groups) == [["c", "a"]]
    assert found.saved_usd == pytest.approx(10 * (H20 + H800))
    assert [move.job for move in found.moves] in (["a"], ["c"])
    assert "dissolved" in found.why


def test_a_move_that_costs_more_than_it_saves_is_not_made():
    slow = tuple(
        group._replace(jobs=tuple(p._replace(job=p.job._replace(cold_s=40000.0, slo=9.0)) for p in group.jobs)) for group in two_halves()
    )

    found = regroup(slow, 1, HOURS, CLUSTER)

    assert found.moves == ()
    assert found.groups == slow
    assert found.why == "no group is worth dissolving after a job has left group 1"


def test_a_cold_start_counts_against_the_bound_of_what_is_left():
    groups = tuple(group._replace(jobs=tuple(p._replace(job=p.job._replace(cold_s=600.0)) for p in group.jobs)) for group in two_halves())

    assert regroup(groups, 1, HOURS, CLUSTER).moves
    assert not regroup(groups, 1, dict.fromkeys(HOURS, 1000.0), CLUSTER).moves


def test_settling_looks_around_every_group_and_pays_each_cold_start():
    """Three groups of two have lost a job each: two of the three that are left fit together."""
    groups = grouped(*(job(name, slo=1.2, cold_s=60.0) for name in "abcdef"))
    assert names(groups) == [["a", "b"], ["c", "d"], ["e", "f"]]
    for name in "bdf":
        groups = depart(groups, name)
    left = dict.fromkeys("ace", 36000.0)

    found = settled(groups, left, CLUSTER)

    assert sorted(len(group.jobs) for group in found.groups) == [1, 2]
    assert len(found.moves) == 1
    assert found.saved_usd == pytest.approx(10 * (H20 + H800) - (H20 + H800) * 60 / 3600)
    assert settled(found.groups, left, CLUSTER).moves == ()
    assert settled(found.groups, left, CLUSTER).why == "no group is worth dissolving"


WHOLE = RolloutTail()
HALF = RolloutTail(0.5, 0.25, 1.2)
"""The rest goes on after half of a rollout, on a quarter of the engines, a fifth slower."""


def rates(*jobs):
    found = slowdowns(jobs, 0.0, 12, [math.inf] * len(jobs))
    assert found is not None
    return [sum(own) / len(own) for own in found]


def phased_job(rollout, train, nodes=(0,), tail=WHOLE):
    return PhasedJob([StepTimes(0.0, rollout, train)], [rollout + train], nodes, tail=tail)


def test_a_rollout_that_is_waited_for_gives_its_nodes_away_as_its_tail_begins():
    """Two rollouts of 100 s and updates of 20 s fill a node. With tails the next starts after 50 s on three quarters of the engines."""
    whole, tails = ([phased_job(100, 20, tail=tail)] * 2 for tail in (WHOLE, HALF))

    assert rates(*whole) == pytest.approx([200 / 120] * 2)
    one = rates(*tails)[0] * 120
    assert 120 + 50 * 0.2 < one < 150


def test_a_meta_iteration_of_rollouts_that_fill_a_node_is_shorter_with_tails_and_longer_where_they_are_slow():
    whole, tails, slow = (meta_iteration_s([phased_job(100, 1, tail=tail)] * 2) for tail in (WHOLE, HALF, HALF._replace(slower=2.0)))

    assert whole == pytest.approx(200)
    assert tails == pytest.approx(2 * 100 * HALF.held)
    assert tails < slow < whole


def test_a_rollout_that_shares_no_node_keeps_its_engines_and_its_time():
    alone, apart = phased_job(100, 50, tail=HALF), phased_job(100, 50, nodes=(1,), tail=HALF)

    assert rates(alone) == [1.0]
    assert rates(alone, apart) == pytest.approx(rates(phased_job(100, 50), phased_job(100, 50, nodes=(1,))))


def test_tails_let_a_node_take_a_job_that_whole_rollouts_fill():
    def groups(tail):
        return grouped(job("a", 100, 20, slo=1.4, tail=tail), job("b", 100, 20, slo=1.4, tail=tail))

    assert [len(group.nodes) for group in groups(WHOLE)] == [2]
    assert [len(group.nodes) for group in groups(HALF)] == [1]


def test_a_group_that_is_kept_for_those_who_come_saves_nothing():
    """c has 100 s left and a 10 h: a would keep c's group for them."""
    found = regroup(two_halves(), 1, HOURS | {"c": 100.0}, CLUSTER)

    assert [(move.job, move.target) for move in found.moves] == [("c", 0)]
    assert found.saved_usd == pytest.approx(100 / 3600 * (H20 + H800))


def test_whoever_is_slowed_by_a_move_pays_for_it():
    def saved(train_s):
        groups = depart(depart(grouped(*(job(name, 100, train_s, slo=1.6) for name in "abcd")), "b"), "d")
        return regroup(groups, groups[-1].number, HOURS, CLUSTER).saved_usd

    assert saved(125.0) == pytest.approx(10 * (H20 + H800) * (1 - (250 / 225 - 1)), rel=0.02)
