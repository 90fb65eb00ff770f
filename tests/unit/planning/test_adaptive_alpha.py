"""α goes where it is worth most, waits for evidence, and comes back from where it was not."""

import math
from dataclasses import replace

import pytest

from rubato.planning.adaptive_alpha import LEAST_ESS, REST, WINDOW, AlphaBounds, StepFigures, adapt, begin

BOUNDS = AlphaBounds(0, 8)
BUSY = StepFigures(seconds=10.0, samples=64, waited_s=0.0, rollout_idle=0.0, spare=False, age=1.0)


def run(state, figures, steps, bounds=BOUNDS):
    """The state and the (alpha, why) of each change; `figures(alpha, n)` are what a step shows."""
    changes = []
    for number in range(steps):
        before = state.alpha
        plan = adapt(state, figures(state.alpha, number), bounds)
        state = plan.state
        assert (state.alpha != before) == bool(plan.why)
        if plan.why:
            changes.append((state.alpha, plan.why))
    return state, changes


def test_the_first_steps_are_not_judged_and_then_a_whole_window_is():
    idle = replace(BUSY, waited_s=8.0, rollout_idle=0.8)
    state, changes = run(begin(1, BOUNDS), lambda alpha, n: idle, 2 + WINDOW - 1)
    assert changes == []

    assert adapt(state, idle, BOUNDS).state.alpha == 2


def test_where_both_sides_wait_alpha_goes_up_and_says_why():
    _, [(alpha, why)] = run(begin(1, BOUNDS), lambda alpha, n: replace(BUSY, waited_s=4.0, rollout_idle=0.5), 7)

    assert alpha == 2
    assert why == "trainer idle 40%, rollout places without a slot 50%: +13% effective samples/s expected"


def test_a_side_that_never_waits_gains_nothing_from_a_larger_bound():
    for busy in (replace(BUSY, waited_s=9.0, rollout_idle=0.0), replace(BUSY, waited_s=0.0, rollout_idle=0.9)):
        state, changes = run(begin(1, BOUNDS), lambda alpha, n, busy=busy: busy, 100)
        assert (state.alpha, changes) == (1, [])


def test_a_trainer_that_always_has_a_spare_batch_needs_no_such_age():
    state, changes = run(begin(4, BOUNDS), lambda alpha, n: replace(BUSY, spare=alpha > 1, age=float(alpha)), 100)

    assert [alpha for alpha, _ in changes] == [3, 2, 1]
    assert state.alpha == 1


def test_what_did_not_come_true_is_taken_back_and_tried_ever_more_rarely():
    def figures(alpha, n):
        return replace(BUSY, waited_s=5.0, rollout_idle=0.5, ess=0.9 if alpha > 1 else 1.0, age=1.0)

    _, changes = run(begin(1, BOUNDS), figures, 400)

    assert [alpha for alpha, _ in changes[:4]] == [2, 1, 2, 1]
    assert changes[1][1] == "2 instead of 1 brought -10% effective samples/s"
    once, _ = run(begin(1, BOUNDS), figures, 2 + WINDOW + 3 + WINDOW + 3)
    rested, again = run(once, figures, REST * WINDOW - 1)
    assert again == []
    assert run(rested, figures, 1)[0].alpha == 2
    assert len(changes) < 12


def test_where_steps_differ_widely_one_window_does_not_take_back_what_was_expected():
    """The rate of the second window is 15 % lower, by chance: steps take from 1 to 40 s."""

    def figures(alpha, n):
        seconds = (1.0, 2.0, 40.0, 1.0, 6.0)[n % 5] * (1.15 if alpha > 1 else 1.0)
        return replace(BUSY, seconds=seconds, waited_s=0.9 * seconds, rollout_idle=0.9)

    _, changes = run(begin(1, BOUNDS), figures, 2 + WINDOW + 3 + WINDOW)

    assert [alpha for alpha, _ in changes] == [2, 3]


@pytest.mark.parametrize("lost", [{"ess": LEAST_ESS / 2}, {"kl": -math.log(LEAST_ESS)}])
def test_few_effective_samples_bring_alpha_down_whatever_the_rate(lost):
    figures = replace(BUSY, waited_s=9.0, rollout_idle=0.9, age=3.0, **lost)

    _, changes = run(begin(3, BOUNDS), lambda alpha, n: figures, 4 + WINDOW)

    assert [alpha for alpha, _ in changes] == [2]
    assert "of the samples are effective" in changes[0][1]


def test_the_divergence_counts_where_it_is_worse_than_the_sampled_share():
    assert replace(BUSY, ess=0.95, kl=0.2).effective == pytest.approx(math.exp(-0.4))
    assert replace(BUSY, ess=0.5, kl=0.2).effective == 0.5


def test_bounds_that_changed_take_alpha_along():
    plan = adapt(begin(6, BOUNDS), BUSY, AlphaBounds(0, 3))

    assert plan.state.alpha == 3
    assert plan.why == "the bounds are 0 and 3"


@pytest.mark.parametrize(("least", "most"), [(2, 1), (-1, 3)])
def test_bounds_the_wrong_way_round_are_refused(least, most):
    with pytest.raises(ValueError, match=f"at least {least} and at most {most}"):
        AlphaBounds(least, most)
