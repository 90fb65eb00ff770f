"""Engines between prefill and decode: valid, steady on a steady load, and where the work is."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rubato.planning.prefill_decode import MIN_GAIN, Stage, balance, throughput

works = st.floats(0.0, 1e3)
nums = st.integers(1, 16)


def settled(num_prefill, num_decode, prefill_s, decode_s, rounds=40):
    """Where repeated plans end on a load whose slower stage always has the longer line."""
    seen = [num_prefill]
    for _ in range(rounds):
        at, total = seen[-1], num_prefill + num_decode
        slow_prefill = at / max(prefill_s, 1e-9) < (total - at) / max(decode_s, 1e-9)
        plan = balance(Stage(at, prefill_s, 1.0 if slow_prefill else 0.0), Stage(total - at, decode_s, 0.0 if slow_prefill else 1.0))
        seen.append(plan.num_prefill)
    return seen


@given(nums, nums, works, works, works, works)
def test_both_stages_keep_an_engine_and_at_most_one_changes(num_p, num_d, work_p, work_d, queue_p, queue_d):
    plan = balance(Stage(num_p, work_p, queue_p), Stage(num_d, work_d, queue_d))

    assert 1 <= plan.num_prefill <= num_p + num_d - 1
    assert abs(plan.num_prefill - num_p) <= 1
    assert plan.why


@given(nums, nums, st.floats(1e-3, 1e3), st.floats(1e-3, 1e3))
def test_a_steady_load_ends_without_swinging_within_the_hysteresis_of_the_best_split(num_p, num_d, work_p, work_d):
    seen = settled(num_p, num_d, work_p, work_d)

    steps = [after - before for before, after in itertools.pairwise(seen) if after != before]
    assert len(set(steps)) <= 1  # one direction
    assert seen[-1] == seen[-2]
    total = num_p + num_d
    best = max(throughput(n, total - n, work_p, work_d) for n in range(1, total))
    assert throughput(seen[-1], total - seen[-1], work_p, work_d) * MIN_GAIN >= best * 0.999


@given(nums, nums, works, st.floats(0.0, 1e3))
def test_more_prefill_work_never_takes_an_engine_from_prefill(num_p, num_d, work, more):
    less, most = (balance(Stage(num_p, w, 1.0), Stage(num_d, 1.0, 0.5)).num_prefill for w in (work, work + more))

    assert most >= min(less, num_p)


@pytest.mark.parametrize(("prefill_s", "decode_s", "expected"), [(3.0, 1.0, 3), (1.0, 3.0, 1), (1.0, 1.0, 2)])
def test_four_engines_go_where_the_work_is(prefill_s, decode_s, expected):
    assert settled(2, 2, prefill_s, decode_s)[-1] == expected


def test_without_a_line_nothing_changes():
    assert balance(Stage(2, 9.0, 0.0), Stage(2, 1.0, 0.0)).num_prefill == 2


def test_a_change_says_what_it_promises():
    assert balance(Stage(1, 3.0, 0.5), Stage(3, 1.0, 0.0)).why == (
        "2 prefill and 2 decode: requests wait 0.5 s for prefill, and the best split lets 3.00 times as many through"
    )
