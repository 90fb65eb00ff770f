"""The rules of admission on the same lengths in virtual time, and α that adapts beside every fixed one."""

import pytest

from rubato.planning.adaptive_alpha import AlphaBounds
from rubato.sim.admission.job import DRIFT, distributions, length_job, measured
from rubato.sim.admission.rules import ArealRule, PrimeRlRule, RollRule, RuleView, WaitingGroup
from rubato.sim.admission.workloads import ALPHAS, TAIL, hardware, workloads
from rubato.sim.buffer_model import ess_of


def view(*, version=0, running=0, ready=(), bound=0, completed=0):
    return RuleView(4, version, running, ready, bound, completed)


READY = tuple(WaitingGroup(admitted, completed) for admitted, completed in ((2, 9), (5, 3), (6, 7), (7, 4), (9, 1)))


def play(name, rule, *, steps=60, seed=1, **changes):
    return length_job(workloads()[name], rule, steps=steps, seed=seed, hardware=hardware(), **changes)


# -- the models of published rules ---------------------------------------------------------------------------------


def test_areal_admits_by_counts_and_drops_nothing():
    rule = ArealRule(2)

    assert rule.admit(view()) == 3 * 4
    assert rule.admit(view(version=5, running=6, completed=24)) == 8 * 4 - 30
    assert not rule.is_old(100)
    assert rule.take(view(ready=READY)) == (0, 1, 2, 3)
    assert rule.take(view(ready=READY[:3])) is None


def test_roll_keeps_a_buffer_of_one_and_alpha_batches_and_drops_what_is_older():
    rule = RollRule(2)

    assert rule.admit(view(running=5, ready=READY[:2], bound=4)) == 12 - 11
    assert [rule.is_old(age) for age in (2, 3)] == [False, True]
    assert rule.take(view(ready=READY)) == (0, 1, 2, 3)


def test_prime_rl_starts_rollouts_until_a_batch_waits_and_takes_what_came_first():
    rule = PrimeRlRule(2)

    assert rule.admit(view(running=50, ready=READY[:3])) == 4
    assert rule.admit(view(ready=READY)) == 0
    assert [rule.is_old(age) for age in (2, 3)] == [False, True]
    assert rule.take(view(ready=READY)) == (4, 1, 3, 2)


# -- side by side ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tails():
    """On a heavy tail with a bound of 2, by the name of the rule."""
    rules = {"ours": 2, "areal": ArealRule(2), "roll": RollRule(2), "prime-rl": PrimeRlRule(2)}
    found = {name: measured(play("heavy tail", rule)) for name, rule in rules.items()}
    return found | {"drop": measured(play("heavy tail", 2, drops=True))}


def test_ours_keeps_the_bound_drops_nothing_and_selects_no_lengths(tails):
    assert tails["ours"].age_max <= 2
    assert tails["ours"].dropped == 0
    assert tails["ours"].length_bias == pytest.approx(1, abs=0.03)


def test_counts_alone_bound_no_age(tails):
    assert tails["areal"].dropped == 0
    assert tails["areal"].age_max > 2


def test_ours_that_drops_is_faster_at_the_same_bound_and_its_cancels_give_engines_back(tails):
    assert tails["drop"].tokens_s > 1.3 * tails["ours"].tokens_s
    assert tails["drop"].tokens_s > tails["roll"].tokens_s


@pytest.mark.parametrize("rule", ["drop", "roll", "prime-rl"])
def test_dropping_what_is_old_keeps_the_bound_and_trains_on_shorter_samples(tails, rule):
    assert tails[rule].age_max <= 2
    assert tails[rule].dropped > 0.01
    assert tails[rule].length_bias < tails["ours"].length_bias - 0.03


def test_every_digitised_distribution_is_there_and_rises():
    found = distributions()

    assert sorted(found) == ["14B-8k", "7B-4k", "7B-8k", "code", "judge", "math"]
    assert found["math"].at(0.5) == pytest.approx(668, rel=0.03)
    assert found["math"].at(0.94) == pytest.approx(4005, rel=0.1)
    assert found["math"].at(1.0) == 16384


# -- α that adapts ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("load", ["rollout-bound", "heavy tail", "trainer-bound"])
def test_auto_is_within_3_percent_of_the_best_fixed_alpha_and_15_above_the_worst(load):
    worth = {alpha: measured(play(load, alpha, steps=400)).value for alpha in ALPHAS}
    auto = worth.pop("auto")

    assert auto >= 0.97 * max(worth.values())
    assert auto >= 1.15 * min(worth.values())


def test_auto_drops_nothing_keeps_its_bounds_and_says_why_it_moved():
    played = play("heavy tail", "auto", steps=120, bounds=AlphaBounds(1, 3))
    changes = played.job.buffer.alphas

    assert [alpha for _, alpha, _ in changes] == [2, 3]
    assert all(why.startswith("staleness.alpha goes from ") for _, _, why in changes)
    assert max(played.job.buffer.ages) == 3
    assert "stale" not in played.job.buffer.fates


def test_the_effective_share_falls_with_age_as_the_law_says():
    assert ess_of([0, 0], DRIFT) == 1.0
    assert ess_of([1], DRIFT) == pytest.approx(0.914, abs=0.001)
    assert ess_of([4], DRIFT) == pytest.approx(0.698, abs=0.001)
    assert ess_of([0, 4], DRIFT) < (1 + ess_of([4], DRIFT)) / 2
    assert TAIL in distributions()
