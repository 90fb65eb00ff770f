"""Placement of jobs into groups: whatever arrives and leaves, memory, bounds and nodes hold; and Theorem 1 of RollMux."""

from hypothesis import given
from hypothesis import strategies as st

from rubato.planning.coexecution import JobProfile, NodePool, SharedCluster, admit, depart, keeps, place
from rubato.planning.regrouping import regroup, settled
from rubato.planning.round_robin import PhasedJob, StepTimes, meta_iteration_s, slowdowns

MEMORY = 1000.0
seconds = st.floats(10, 500)


@st.composite
def profiles(draw):
    seen = draw(st.lists(st.floats(0.2, 1.0), min_size=8, max_size=12) | st.just([]))
    rollout, train = draw(seconds), draw(seconds)
    return JobProfile(
        "",
        rollout,
        train,
        draw(st.integers(1, 3)),
        draw(st.integers(1, 3)),
        draw(st.floats(100, 600)),
        draw(st.floats(100, 600)),
        draw(st.floats(1, 2.5)),
        environment_s=draw(st.just(0.0) | seconds),
        cores=draw(st.sampled_from((1.0, 16.0, 32.0))),
        cold_s=draw(st.floats(0, 100)),
        seen=tuple(StepTimes(0.0, rollout * part, train * part) for part in seen),
    )


@st.composite
def arrivals(draw):
    return [job._replace(name=f"j{at}") for at, job in enumerate(draw(st.lists(profiles(), min_size=1, max_size=8)))]


@st.composite
def clusters(draw):
    nodes = draw(st.sampled_from((4, 10_000)))
    return SharedCluster(
        NodePool(14.8, MEMORY, nodes, draw(st.sampled_from((0.0, 2.0))), 32.0),
        NodePool(42.24, MEMORY, nodes, draw(st.sampled_from((0.0, 4.0)))),
        residents=draw(st.integers(2, 5)),
        epsilon=draw(st.sampled_from((0.0, 0.1))),
    )


def check(groups, cluster):
    assert sum(len(group.nodes) for group in groups) <= cluster.rollout.nodes
    assert sum(group.train_nodes for group in groups) <= cluster.train.nodes
    for group in groups:
        assert 1 <= len(group.jobs) <= cluster.residents
        assert {node for pinned in group.jobs for node in pinned.nodes} == set(group.nodes)
        for pinned in group.jobs:
            assert len(set(pinned.nodes)) == pinned.job.rollout_nodes
        for node in group.nodes:
            held = sum(pinned.job.rollout_bytes for pinned in group.jobs if node in pinned.nodes)
            assert held <= MEMORY * (1 + 1e-6)
        whole = (p.job.train_bytes * max(1, p.job.train_nodes / group.train_nodes) for p in group.jobs)
        assert len(group.jobs) == 1 or sum(whole) <= MEMORY * (1 + 1e-6)
        assert len(group.jobs) == 1 or keeps(group, cluster) is not None


def cost(groups, cluster):
    return sum(group.usd_hour(cluster) for group in groups)


@given(arrivals(), clusters())
def test_memory_bounds_and_nodes_hold_after_every_arrival_and_the_price_is_as_planned(jobs, cluster):
    groups = ()
    for job in jobs:
        plan = place(job, groups, cluster)
        assert plan == place(job, groups, cluster)
        assert plan.why
        pools = {group.number: group.train_nodes for group in groups}
        after = admit(groups, job, plan)
        assert abs(cost(after, cluster) - cost(groups, cluster) - plan.usd_hour) < 1e-6
        assert all(group.train_nodes == pools.get(group.number, job.train_nodes) for group in after)
        groups = after
        check(groups, cluster)


@given(arrivals(), clusters())
def test_certain_durations_keep_every_bound_in_the_simulated_round_robin(jobs, cluster):
    cluster = cluster._replace(epsilon=0.0)
    groups = ()
    for job in jobs:
        groups = admit(groups, job, place(job, groups, cluster))

    for group in groups:
        if len(group.jobs) > 1:
            found = keeps(group, cluster)
            assert all(found[pinned.job.name] <= pinned.job.slo * (1 + 1e-6) for pinned in group.jobs)


@given(arrivals(), clusters(), st.data())
def test_bounds_hold_whoever_leaves(jobs, cluster, data):
    groups = ()
    for job in jobs:
        groups = admit(groups, job, place(job, groups, cluster))
    for name in data.draw(st.permutations([p.job.name for group in groups for p in group.jobs])):
        groups = depart(groups, name)
        assert all(len(group.jobs) == 1 or keeps(group, cluster) is not None for group in groups)


@given(arrivals(), clusters(), st.data())
def test_regrouping_after_departures_loses_nobody_and_never_costs_more(jobs, cluster, data):
    groups = ()
    for job in jobs:
        groups = admit(groups, job, place(job, groups, cluster))
    placed = [(p.job, group.number) for group in groups for p in group.jobs]
    gone, changed = data.draw(st.sampled_from(placed))
    groups = depart(groups, gone.name)
    left = {job.name: data.draw(st.floats(0, 1e5)) for job, _ in placed}

    plan = regroup(groups, changed, left, cluster)

    assert sorted((p.job for g in plan.groups for p in g.jobs), key=lambda j: j.name) == sorted(
        (job for job, _ in placed if job.name != gone.name), key=lambda j: j.name
    )
    assert plan.saved_usd >= 0
    assert plan == regroup(groups, changed, left, cluster)
    check(plan.groups, cluster)
    everywhere = settled(groups, left, cluster)
    check(everywhere.groups, cluster)
    assert sorted(p.job.name for g in everywhere.groups for p in g.jobs) == sorted(p.job.name for g in groups for p in g.jobs)
    assert len({move.source for move in everywhere.moves}) + len(everywhere.groups) == len(groups)


@st.composite
def unsaturated(draw):
    """Jobs on one rollout node whose rollouts and updates together take at most as long as the longest job alone."""
    shapes = draw(st.lists(st.tuples(st.floats(1, 100), st.floats(1, 100)), min_size=2, max_size=5))
    # The first is made long enough: its rollout covers the others' updates, and its update their rollouts.
    rest = [sum(phase) for phase in zip(*shapes[1:], strict=True)]
    shapes[0] = (max(shapes[0][0], rest[1]), max(shapes[0][1], rest[0]))
    return shapes


def jobs_of(shapes):
    return [PhasedJob([StepTimes(0.0, r, t)], [r + t], (0,)) for r, t in shapes]


@given(unsaturated(), st.data())
def test_theorem_1_an_unsaturated_round_robin_takes_as_long_as_its_longest_job_alone(shapes, data):
    longest = max(r + t for r, t in shapes)
    order = data.draw(st.permutations(shapes))

    cycle = meta_iteration_s(jobs_of(order))

    assert abs(cycle - longest) < 1e-6 * longest


@given(unsaturated(), st.data())
def test_theorem_1_leaving_out_a_job_that_is_not_the_longest_uses_the_pools_less(shapes, data):
    longest = max(range(len(shapes)), key=lambda at: sum(shapes[at]))
    at = data.draw(st.sampled_from([i for i in range(len(shapes)) if i != longest]))
    fewer = [shape for i, shape in enumerate(shapes) if i != at]

    def utilisation(jobs):
        return sum(map(sum, jobs)) / (2 * meta_iteration_s(jobs_of(jobs)))

    assert utilisation(fewer) < utilisation(shapes) <= 1 + 1e-9


@given(st.lists(st.tuples(seconds, seconds), min_size=1, max_size=5))
def test_a_round_robin_takes_at_least_each_job_alone_and_all_work_of_each_pool(shapes):
    cycle = meta_iteration_s(jobs_of(shapes))

    least = max(sum(r for r, _ in shapes), sum(t for _, t in shapes), *(r + t for r, t in shapes), 0)
    assert abs(cycle - least) < 0.05 * least
    assert cycle >= least * (1 - 1e-6)


@given(st.lists(st.tuples(seconds, seconds), min_size=1, max_size=4))
def test_nobody_is_faster_in_a_group_than_alone(shapes):
    ratios = slowdowns(jobs_of(shapes), 0.0, 4, [float("inf")] * len(shapes))

    assert all(ratio >= 1 - 1e-9 for own in ratios for ratio in own)


@given(st.lists(seconds, min_size=1, max_size=12), st.integers(1, 20))
def test_alone_in_its_group_a_job_is_not_slowed_whatever_its_steps(durations, window):
    steps = [StepTimes(0.0, each, 2 * each) for each in durations]

    (own,) = slowdowns([PhasedJob(steps, [3 * each for each in durations], (0,))], 0.0, 16, [2.0], window=window)

    assert all(abs(ratio - 1) < 1e-9 for ratio in own)
