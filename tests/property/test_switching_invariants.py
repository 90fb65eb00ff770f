"""When to change circuits, and how to broadcast: the exact answer, found the slow way too."""

from collections import defaultdict
from itertools import product

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from planning.broadcast import best, bound_s, rings, tree
from planning.switching import PhaseCost, schedule

QUIET = settings(deadline=None)
"""Busy machines are slow; nothing here is about time."""

SECONDS = st.integers(0, 64).map(lambda n: n / 8)


@st.composite
def jobs(draw):
    num = draw(st.integers(1, 3))
    phase = st.builds(PhaseCost, SECONDS, st.tuples(*[SECONDS] * num), SECONDS)
    return draw(st.lists(phase, min_size=1, max_size=4)), draw(SECONDS)


def period(phases, choices, delay_s):
    total, changes = 0.0, 0
    for i, (phase, k) in enumerate(zip(phases, choices, strict=True)):
        total += max(phase.window_s, phase.busy_s[k]) + phase.idle_s
        if choices[i - 1] != k:
            before = phases[i - 1]
            total += max(0.0, delay_s - max(0.0, before.window_s - before.busy_s[choices[i - 1]]) - before.idle_s)
            changes += 1
    return total, changes


@QUIET
@given(jobs())
def test_no_other_choice_has_a_shorter_period_or_as_short_a_one_with_fewer_changes(job):
    phases, delay_s = job

    found = schedule(phases, delay_s)

    every = product(range(len(phases[0].busy_s)), repeat=len(phases))
    assert (found.period_s, found.num_switches) == min(period(phases, choices, delay_s) for choices in every)
    assert period(phases, found.choices, delay_s) == (found.period_s, found.num_switches)


@QUIET
@given(jobs())
def test_a_longer_delay_never_shortens_the_period(job):
    phases, delay_s = job

    assert schedule(phases, delay_s).period_s <= schedule(phases, delay_s + 1).period_s


@example(4, 2, tree, 1)
@example(5, 2, tree, 1)
@given(st.integers(2, 12), st.integers(1, 4).map(lambda n: 2 * n), st.sampled_from([rings, tree]), st.integers(1, 64))
@settings(QUIET, max_examples=60)
def test_a_broadcast_reaches_everybody_and_no_link_carries_more_than_it_says(num, ports, make, num_pieces):
    if make is tree and num > 4 and ports < 3:
        with pytest.raises(ValueError, match="ports each"):
            tree(num, ports)
        return
    found = make(num, ports)

    used = defaultdict(int)
    for a, b in found.links:
        used[a] += 1
        used[b] += 1
    assert all(n <= ports for n in used.values())
    carried, got = defaultdict(float), defaultdict(dict)
    has = {stream: {0} for stream in {hop.stream for hop in found.hops}}
    for hop in found.hops:
        assert hop.source in has[hop.stream]
        has[hop.stream].add(hop.target)
        carried[hop.source, hop.target] += hop.share
        assert hop.stream not in got[hop.target]
        got[hop.target][hop.stream] = hop.share
    assert all(sum(got[node].values()) == 1.0 for node in range(1, num))
    fullest = max(v / found.links.count((min(arc), max(arc))) for arc, v in carried.items())
    assert fullest == pytest.approx(found.seconds_per_byte)
    assert found.seconds(100.0, 2.0, num_pieces) >= bound_s(100.0, ports, 2.0) - 1e-9


@QUIET
@given(st.integers(2, 40), st.integers(1, 8).map(lambda n: 2 * n))
def test_rings_reach_the_bound_but_for_the_filling_of_the_pipeline(num, ports):
    found = rings(num, ports)

    assert found.seconds(100.0, 2.0, 10**9) == pytest.approx(bound_s(100.0, ports, 2.0), rel=1e-6)


@QUIET
@given(st.integers(2, 40), st.integers(2, 8).map(lambda n: 2 * n), st.integers(1, 1000))
def test_the_best_broadcast_is_no_slower_than_either(num, ports, num_pieces):
    _, found = best(num, ports, num_pieces)

    assert found.seconds(1.0, 1.0, num_pieces) <= min(
        f(num, ports).seconds(1.0, 1.0, num_pieces) for f in (rings, tree)
    )
