"""RollPacker's choice of tensor parallelism from preemptions: its rule, and what holds for every history."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rubato.planning.parallelism import PreemptionTrend, by_preemptions

COUNTS = st.lists(st.integers(0, 10_000), max_size=40)
DEGREES = st.sets(st.sampled_from((1, 2, 4, 8)), min_size=1)


def degrees_of(counts: list[int], degrees: tuple[int, ...] = (1, 2, 4, 8), first: int = 1) -> list[int]:
    """Of the steps after each."""
    trend, found = PreemptionTrend(first), list[int]()
    for count in counts:
        trend, why = by_preemptions(trend, count, degrees)
        assert f"TP{trend.degree}" in why
        found.append(trend.degree)
    return found


def test_the_published_rule() -> None:
    assert degrees_of([100, 105]) == [1, 1]
    assert degrees_of([100, 106]) == [1, 2]
    assert degrees_of([0, 0, 0, 0], first=4) == [4, 4, 4, 2]
    assert degrees_of([0, 0, 5, 0, 0, 0, 0], first=4) == [4, 4, 8, 8, 8, 8, 4]


def test_a_new_degree_is_measured_before_it_is_judged() -> None:
    assert degrees_of([100, 200, 300, 400]) == [1, 2, 2, 4]


@given(COUNTS, DEGREES)
def test_it_moves_by_a_factor_of_two_within_what_is_allowed(counts: list[int], degrees: set[int]) -> None:
    first = min(degrees)
    found = [first, *degrees_of(counts, tuple(degrees), first)]

    assert set(found) <= degrees
    assert {max(a, b) // min(a, b) for a, b in pairwise(found)} <= {1, 2}


@given(COUNTS, st.integers(0, 10_000), st.integers(0, 10_000))
def test_more_preemptions_never_mean_a_lower_degree(counts: list[int], one: int, other: int) -> None:
    few, many = sorted((one, other))
    trend = PreemptionTrend(2)
    for count in counts:
        trend, _ = by_preemptions(trend, count, (1, 2, 4, 8))

    assert by_preemptions(trend, few, (1, 2, 4, 8))[0].degree <= by_preemptions(trend, many, (1, 2, 4, 8))[0].degree


def test_no_fewer_than_none_are_possible() -> None:
    with pytest.raises(ValueError, match="preempted is -1"):
        by_preemptions(PreemptionTrend(1), -1, (1, 2))
