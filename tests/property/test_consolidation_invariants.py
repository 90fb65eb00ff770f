"""Whatever is left of a rollout: no request is lost, and no engine is kept without need."""

from math import ceil

from hypothesis import given
from hypothesis import strategies as st

from rubato.planning.consolidation import consolidate, is_tail

LOADS = st.lists(st.integers(0, 8), min_size=1, max_size=8)


@given(LOADS, st.integers(8, 16))
def test_every_request_ends_on_an_engine_that_is_kept_and_has_a_slot_for_it(loads, num_slots):
    requests = {f"engine-{i}": [f"{i}.{j}" for j in range(num)] for i, num in enumerate(loads)}

    plan = consolidate(requests, num_slots)

    held = {engine: len(requests[engine]) for engine in plan.kept}
    for target in plan.moves.values():
        held[target] += 1
    assert sum(held.values()) == sum(loads)
    assert all(num <= num_slots for num in held.values())
    assert set(plan.moves) == {r for engine, own in requests.items() if engine not in plan.kept for r in own}


@given(LOADS, st.integers(8, 16))
def test_no_fewer_engines_would_do_and_those_with_the_most_requests_stay(loads, num_slots):
    requests = {f"engine-{i}": [f"{i}.{j}" for j in range(num)] for i, num in enumerate(loads)}

    plan = consolidate(requests, num_slots)

    assert len(plan.kept) == max(1, ceil(sum(loads) / num_slots))
    left = [len(requests[engine]) for engine in requests if engine not in plan.kept]
    assert all(len(requests[engine]) >= max(left, default=0) for engine in plan.kept)


def test_the_tail_begins_at_four_fifths():
    assert [is_tail(left, 10) for left in (0, 1, 2, 3)] == [False, True, True, False]
