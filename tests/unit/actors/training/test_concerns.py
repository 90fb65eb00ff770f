"""What may spoil a result without any error."""

import msgspec
import pytest

from actors.config import TrainSection
from actors.training.concerns import SPREADLESS_STEPS, InfoWatch, SpreadWatch, clip_concern, lr_concern, usual_lr

FLAT = {"reward/zero_std_frac": 1.0, "reward/std": 0.0}


@pytest.mark.parametrize(
    ("num_parameters", "lr"),
    [(0.5e6, 1e-3), (0.5e6, 5e-4), (1.5e9, 1e-6), (7e9, 1e-6), (32e9, 1e-6), (0.6e9, 1e-5), (70e9, 5e-7)],
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


@pytest.mark.parametrize(
    "given", [{}, {"loss": "gspo"}, {"loss": "dapo", "clip_high": 0.5}, {"loss": "cispo", "clip_high": 4}]
)
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

    def make(*rewards, same=False):
        return [trajectory([1, 2 if same else 2 + i], [0, 1], reward=r) for i, r in enumerate(rewards)]

    return make


def test_steps_without_spread_are_told_once_and_only_in_a_row(group):
    watch, groups = SpreadWatch("group"), [group(0.0, 0.0)]

    few = [watch.step(FLAT, groups) for _ in range(SPREADLESS_STEPS - 1)]
    broken = watch.step({"reward/zero_std_frac": 0.5}, groups)
    many = [watch.step(FLAT, groups) for _ in range(2 * SPREADLESS_STEPS)]

    assert [*few, broken] == [""] * SPREADLESS_STEPS
    assert [bool(said) for said in many].index(True) == SPREADLESS_STEPS - 1
    assert sum(map(bool, many)) == 1


def test_spread_between_groups_is_enough_where_the_advantage_is_taken_over_the_batch(group):
    between = FLAT | {"reward/std": 0.5}
    groups = [group(0.0, 0.0), group(1.0, 1.0)]

    over_batch, within = SpreadWatch("reinforce_pp"), SpreadWatch("rloo")

    assert not any(over_batch.step(between, groups) for _ in range(2 * SPREADLESS_STEPS))
    assert any(within.step(between, groups) for _ in range(2 * SPREADLESS_STEPS))


@pytest.mark.parametrize(
    ("rewards", "same", "cause"),
    [
        ([(0.0, 0.0), (0.0, 0.0)], False, "Every rollout gets 0: the task is too hard"),
        ([(1.0, 1.0), (1.0, 1.0)], False, "Every rollout gets 1: the task is solved"),
        ([(1.0, 1.0), (0.0, 0.0)], False, "Rewards differ between tasks only"),
        ([(1.0, 1.0), (0.0, 0.0)], True, "is rollout.temperature 0?"),
    ],
)
def test_the_likely_cause_is_named(rewards, same, cause, group):
    watch, groups = SpreadWatch("group"), [group(*each, same=same) for each in rewards]

    said = [watch.step(FLAT, groups) for _ in range(SPREADLESS_STEPS)][-1]

    assert said.startswith("nothing was learned from rewards in the last 5 steps")
    assert cause in said


def test_numbers_of_the_environment_that_no_metric_shows_are_told_once(trajectory):
    many = msgspec.structs.replace(trajectory([1, 2], [0, 1]), info={f"k{n:02d}": 0.0 for n in range(35)})
    few = msgspec.structs.replace(many, info={"k00": 1.0})
    watch = InfoWatch()

    said = [watch.step(groups) for groups in ([[few]], [[few, many]], [[many]])]

    assert said == [
        "",
        "the environment's info has 35 numbers: env/… shows the first 32 by name, without k32, k33, k34",
        "",
    ]
