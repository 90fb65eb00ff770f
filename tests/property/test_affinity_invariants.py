"""Hardware affinity: what holds for every mixture of tasks and every set of classes."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

from rubato.planning.affinity import GAIN, SPLIT, HardwareClass, TaskProfile, plan
from rubato.planning.step_cost import StepCost, fit
from rubato.planning.step_sums import StepSums

TASKS = ("a", "b", "c", "d")
NAMES = ("h20", "h200", "h800")

profiles = st.builds(
    lambda requests, prompt, known, decode: TaskProfile(requests, prompt, prompt * known, decode),
    st.floats(0.1, 50), st.floats(10, 8000), st.floats(0.02, 1), st.floats(1, 2000),
)  # fmt: skip
costs = st.builds(StepCost, st.floats(1e-5, 1e-3), st.floats(1e-3, 3e-2), st.floats(0, 1e-4), st.floats(1e-8, 1e-6))
mixtures = st.dictionaries(st.sampled_from(TASKS), profiles, min_size=1)
classes = st.lists(
    st.builds(HardwareClass, st.sampled_from(NAMES), st.integers(1, 8), st.floats(1, 256), costs),
    unique_by=lambda each: each.name, min_size=1, max_size=3,
)  # fmt: skip
in_flights = st.floats(1, 4000)
LEFT = GAIN * SPLIT * 1.02
"""Gains that are not worth it are left alone, and the search goes in steps of a 64th."""

few = settings(max_examples=60, deadline=None)


@few
@given(mixtures, classes, in_flights)
def test_shares_are_of_classes_that_are_there_and_sum_to_one(tasks, among, in_flight):
    found = plan(tasks, among, in_flight)

    for shares in found.shares.values():
        assert set(shares) <= {each.name for each in among}
        assert all(0 < share <= 1 + 1e-9 for share in shares.values())
        assert sum(shares.values()) == pytest.approx(1)
    assert set(found.shares) in (set(tasks), set())
    assert 0 < found.rate < float("inf")


@few
@given(mixtures, classes, in_flights, st.randoms())
def test_the_plan_depends_on_nothing_but_what_it_is_given_and_not_on_the_order(tasks, among, in_flight, chance):
    names, shuffled = list(tasks), list(among)
    chance.shuffle(names)
    chance.shuffle(shuffled)

    assert plan({name: tasks[name] for name in names}, shuffled, in_flight) == plan(tasks, among, in_flight)


@few
@given(mixtures, classes, in_flights, st.floats(1, 8))
def test_more_requests_in_flight_and_faster_prefill_never_make_it_slower(tasks, among, in_flight, more):
    faster = [each._replace(cost=each.cost._replace(prefill_s=each.cost.prefill_s / more)) for each in among]
    rate = plan(tasks, among, in_flight).rate

    assert plan(tasks, among, in_flight * more).rate >= rate / LEFT
    assert plan(tasks, faster, in_flight).rate >= rate / LEFT


@few
@given(mixtures, classes, in_flights)
def test_a_plan_that_is_followed_is_kept(tasks, among, in_flight):
    found = plan(tasks, among, in_flight)

    again = plan(tasks, among, in_flight, found.shares)

    assert again.shares == found.shares


@few
@given(mixtures, classes)
def test_with_full_slots_it_comes_close_to_the_linear_programs_optimum(tasks, among):
    """Maximise the rate r over r * shares: each class's engines have a second per second, each task gets all of its requests."""
    total = sum(task.requests for task in tasks.values())
    num_tasks, num = len(tasks), len(among)
    load = np.zeros((num, num_tasks * num + 1))
    whole = np.zeros((num_tasks, num_tasks * num + 1))
    for row, task in enumerate(tasks.values()):
        whole[row, -1] = -1.0
        for at, each in enumerate(among):
            cost = each.cost
            own = cost.prefill_s * task.prefill + task.decode * (
                cost.token_s + cost.context_s * (task.prompt + task.decode / 2) + cost.step_s / each.slots
            )
            load[at, row * num + at] = task.requests / total * own / each.engines
            whole[row, row * num + at] = 1.0
    scale = 1.0 / load.max()
    best = linprog([0.0] * (num_tasks * num) + [-1.0], load / load.max(), np.ones(num), whole, np.zeros(num_tasks), method="highs")
    assert best.success

    assert plan(tasks, among, 1e9).rate >= -best.fun * scale / LEFT


@few
@given(costs, st.lists(st.tuples(st.integers(0, 4000), st.integers(0, 64), st.integers(1, 2000)), min_size=40))
def test_steps_that_are_linear_are_told_again_by_the_fit(cost, steps):
    steps += [(500, 0, 1)] * 8 + [(0, 4, 100)] * 8
    sums = StepSums()
    for prefill, batch, each in steps:
        sums.add(prefill, batch, batch * each, cost.seconds(prefill, batch, batch * each))

    found = fit(sums)

    said = sum(cost.seconds(prefill, batch, batch * each) for prefill, batch, each in steps)
    assert sum(found.seconds(p, b, b * e) for p, b, e in steps) == pytest.approx(said, rel=0.05)
