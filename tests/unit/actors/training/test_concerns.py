"""What may spoil a result without any error."""

import msgspec
import pytest

from rubato.actors.config import TrainSection
from rubato.actors.training.checks import (
    IDLE_TOLD,
    SPREADLESS_STEPS,
    InfoWatch,
    SpreadWatch,
    UpdateWatch,
    clip_concern,
    lr_concern,
    spreadless_cause,
    usual_lr,
)

FLAT = {"policy/taught_frac": 0.0, "optim/minibatches": 0.0, "optim/updates": 0.0, "optim/skipped": 0.0}
LEARNED = {"policy/taught_frac": 1.0, "optim/minibatches": 2.0, "optim/updates": 1.0, "optim/skipped": 1.0}
SKIPPED = {"policy/taught_frac": 1.0, "optim/minibatches": 2.0, "optim/updates": 0.0, "optim/skipped": 2.0}
MASKED = {**FLAT, "policy/taught_frac": 0.5, "rollout/cut_frac": 1.0}
NO_GRADIENT = {**SKIPPED, "optim/skipped": 0.0}


@pytest.mark.parametrize(
    ("num_parameters", "lr"), [(0.5e6, 1e-3), (0.5e6, 5e-4), (1.5e9, 1e-6), (7e9, 1e-6), (32e9, 1e-6), (0.6e9, 1e-5), (70e9, 5e-7)]
)
def test_rates_that_were_published_for_a_size_are_no_news(num_parameters, lr):
    assert lr_concern(lr, int(num_parameters)) == ""


@pytest.mark.parametrize(
    ("num_parameters", "lr", "said"),
    [
        (0.6e9, 5e-4, "above what a model of 0.6 B parameters is usually trained with: training is likely to collapse"),
        (7e9, 1e-3, "train.lr=0.001 is 1,000 times above"),
        (0.5e6, 1e-6, "below what a model of 0.5 M parameters is usually trained with: little may be learned"),
    ],
)
def test_a_rate_far_from_what_suits_the_size_is_told(num_parameters, lr, said):
    assert said in lr_concern(lr, int(num_parameters))


@pytest.mark.parametrize("given", [{}, {"loss": "gspo"}, {"loss": "dapo", "clip_high": 0.5}, {"loss": "cispo", "clip_high": 4}])
def test_clips_of_a_paper_or_near_it_are_no_news(given):
    assert clip_concern(TrainSection(**given)) == ""


@pytest.mark.parametrize("clip", [0.28, 0.05])
def test_a_clip_that_another_loss_is_used_to_is_told(clip):
    assert f"train.clip_high={clip:g} is " in clip_concern(TrainSection(loss="gspo", clip_high=clip))
    assert clip_concern(TrainSection(loss="my.py:fn", clip_low=0, clip_high=clip)) == ""


def test_the_usual_rate_goes_through_its_two_anchors():
    assert usual_lr(500_000) == pytest.approx(1e-3)
    assert usual_lr(7_000_000_000) == pytest.approx(1e-6)


@pytest.fixture
def group(trajectory):
    """Makes a group of members with these rewards; `same` says whether their tokens are the same."""

    def make(*rewards, same=False, task="", temperature=1.0):
        members = [trajectory([1, 2 if same else 2 + i], [0, 1], reward=r) for i, r in enumerate(rewards)]
        replace = msgspec.structs.replace
        return [replace(m, ticket=replace(m.ticket, task=task), temperature=temperature) for m in members]

    return make


def test_steps_without_spread_are_told_once_and_only_in_a_row(group):
    watch, groups = SpreadWatch(), [group(0.0, 0.0)]

    few = [watch.step(FLAT, groups) for _ in range(SPREADLESS_STEPS - 1)]
    broken = watch.step(LEARNED, groups)
    many = [watch.step(FLAT, groups) for _ in range(2 * SPREADLESS_STEPS)]

    assert [*few, broken] == [""] * SPREADLESS_STEPS
    assert [bool(said) for said in many].index(True) == SPREADLESS_STEPS - 1
    assert sum(map(bool, many)) == 1
    assert next(filter(None, many)).startswith("nothing was learned from rewards in the last 5 steps")


@pytest.mark.parametrize(
    ("rewards", "options", "cause"),
    [
        ([(0, 0), (0, 0)], {}, "Every rollout gets 0: the task is too hard"),
        ([(1, 1), (1, 1)], {}, "Every rollout gets 1: the task is solved"),
        ([(1, 1), (1, 1)], {"same": True}, "Every rollout gets 1: the task is solved"),
        ([(0.3, 0.1 + 0.2)], {}, "Every rollout gets 0.3: the task is solved"),
        ([(0, 0), (0, 0)], {"same": True}, "the policy gives one answer all of its probability"),
        ([(1, 1), (0, 0)], {"same": True}, "the policy gives one answer all of its probability"),
        ([(0, 0)], {"same": True, "temperature": 0.0}, "as their temperature is 0: set it above 0"),
        ([(1, 1), (0, 0)], {}, "Rewards differ between prompts only"),
        ([(0, 1e-7), (0, 0)], {}, "Rewards of a group differ by 1e-07 at most, and less than 1e-06 counts as equal"),
        ([(5, 5 + 9e-7), (1, 1)], {}, "Rewards of a group differ by 9e-07 at most, and less than 1e-06 counts as equal"),
        ([(0, 1)], {}, "train.overlong_penalty evens out what rewards say"),
    ],
)
def test_the_likely_cause_is_named(rewards, options, cause, group):
    found = spreadless_cause([group(*each, **options) for each in rewards])

    assert cause in found
    assert ("temperature" in found) == ("temperature" in options)


def test_rewards_differ_between_tasks_only_where_there_are_several_and_each_has_one_reward(group):
    by_task = [group(1, 1, task="a"), group(0, 0, task="b"), group(1, 1, task="a")]
    within_one = [*by_task, group(0, 0, task="a")]

    assert "Rewards differ between tasks only" in spreadless_cause(by_task)
    assert "Rewards differ between prompts only" in spreadless_cause(within_one)


@pytest.mark.parametrize(
    ("metrics", "section", "cause"),
    [
        (SKIPPED, {}, "its gradient was not finite (optim/skipped): lower train.lr"),
        (SKIPPED, {"loss": "my.py:fn"}, "look for NaN and infinity in what train.loss=my.py:fn returns"),
        ({**SKIPPED, "policy/taught_frac": 0.0}, {"kl_coef": 0.1}, "every optimiser step was left out"),
        (MASKED, {"overlong": "mask"}, "was cut at its token limit (rollout/cut_frac), and train.overlong=mask leaves out"),
        (MASKED, {}, "no sample has a sampled token to train on"),
        (NO_GRADIENT, {"loss": "my.py:fn"}, "the gradient of the loss is 0: look at what train.loss=my.py:fn returns"),
        ({**NO_GRADIENT, "policy/clip_frac": 1.0}, {}, "every token is clipped (policy/clip_frac = 1)"),
        ({**NO_GRADIENT, "policy/is_capped_frac": 1.0}, {"importance": {"mode": "mask"}}, "more than train.importance.cap"),
    ],
)
def test_steps_that_change_no_weight_are_told_with_their_cause_and_end_the_run(metrics, section, cause):
    watch = UpdateWatch(TrainSection(**section), 10)

    told, ends = [], []
    for _ in range(10):
        told.append([said for said in watch.step(metrics) if "no weight has changed" in said])
        ends.append(watch.nothing_learned())

    assert [len(said) for said in told] == [0] * (IDLE_TOLD - 1) + [1] + [0] * (10 - IDLE_TOLD)
    assert cause in told[IDLE_TOLD - 1][0]
    assert ends[:9] == [""] * 9
    assert ends[9].startswith("nothing was learned: no weight has changed in 10 steps in a row. ")
    assert cause[1:] in ends[9]


def test_an_update_ends_the_row_of_idle_steps_and_a_step_without_spread_does_not():
    watch = UpdateWatch(TrainSection(), 4)

    ends = []
    for metrics in (SKIPPED, SKIPPED, SKIPPED, LEARNED, SKIPPED, FLAT, SKIPPED, FLAT, SKIPPED, SKIPPED):
        watch.step(metrics)
        ends.append(bool(watch.nothing_learned()))

    assert ends == [False] * 9 + [True]


def test_a_solved_task_and_a_trainer_that_does_not_say_are_never_idle():
    solved, scripted = UpdateWatch(TrainSection(), 3), UpdateWatch(TrainSection(), 3)

    told = [solved.step(FLAT) + scripted.step({}) for _ in range(20)]

    assert told == [[]] * 20
    assert solved.nothing_learned(ended=True) == scripted.nothing_learned(ended=True) == ""


@pytest.mark.parametrize(
    ("steps", "max_idle_steps", "fails"),
    [([MASKED] * 2, 10, True), ([SKIPPED], 10, True), ([MASKED, LEARNED, MASKED], 10, False), ([FLAT, MASKED], 10, False),
     ([MASKED] * 20, 0, False), ([], 10, False)],
)  # fmt: skip
def test_a_run_that_ends_before_the_limit_fails_where_every_one_of_its_steps_was_idle(steps, max_idle_steps, fails):
    watch = UpdateWatch(TrainSection(overlong="mask"), max_idle_steps)

    for metrics in steps:
        watch.step(metrics)

    assert bool(watch.nothing_learned(ended=True)) == fails


def test_a_restarted_trainer_goes_on_counting_and_a_run_that_ended_so_gets_another_try():
    restarted, resumed = UpdateWatch(TrainSection(), 4), UpdateWatch(TrainSection(), 4)

    restarted.replay([LEARNED, SKIPPED, SKIPPED, SKIPPED])
    resumed.replay([LEARNED, SKIPPED, SKIPPED, SKIPPED, SKIPPED])
    told = [said for watch in (restarted, resumed) for said in watch.step(SKIPPED)]

    assert restarted.nothing_learned()
    assert not resumed.nothing_learned()
    assert not any("no weight has changed" in said for said in told)


def test_steps_that_are_left_out_now_and_then_are_told_at_the_first_the_tenth_and_the_hundredth():
    watch = UpdateWatch(TrainSection(), 10)

    told = {step: said for step in range(1, 200) if (said := watch.step(LEARNED))}

    assert list(told) == [1, 10, 100]
    assert told[10] == ["10 optimiser steps were left out so far, for a gradient that was not finite (optim/skipped)"]


def test_numbers_of_the_environment_that_no_metric_shows_are_told_once(trajectory):
    many = msgspec.structs.replace(trajectory([1, 2], [0, 1]), info={f"k{n:02d}": 0.0 for n in range(35)})
    few = msgspec.structs.replace(many, info={"k00": 1.0})
    watch = InfoWatch()

    said = [watch.step(groups) for groups in ([[few]], [[few, many]], [[many]])]

    assert said == ["", "the environment's info has 35 numbers: env/… shows the first 32 by name, without k32, k33, k34", ""]
