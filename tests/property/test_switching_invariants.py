"""When to change circuits: the exact answer, found the slow way too."""

from itertools import product

from hypothesis import given, settings
from hypothesis import strategies as st

from rubato.planning.switching import PhaseCost, schedule

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
