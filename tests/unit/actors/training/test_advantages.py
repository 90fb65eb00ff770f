"""Advantages against their formulas in plain loops."""

import random

import pytest

from rubato.actors.config import ADVANTAGES
from rubato.actors.training.losses import advantages_of, batch_advantages, group_advantages, rloo_advantages


def deviation(values):
    mean = sum(values) / len(values)
    total = 0.0
    for value in values:
        total += (value - mean) ** 2
    return (total / (len(values) - 1)) ** 0.5


def group(rewards, i, g):
    """GRPO: over the group's mean, in its deviations."""
    return (rewards[g][i] - sum(rewards[g]) / len(rewards[g])) / deviation(rewards[g])


def unscaled(rewards, i, g):
    """Dr. GRPO: over the group's mean."""
    return rewards[g][i] - sum(rewards[g]) / len(rewards[g])


def rloo(rewards, i, g):
    """RLOO: over the mean of the others."""
    others = 0.0
    for j, reward in enumerate(rewards[g]):
        if j != i:
            others += reward
    return rewards[g][i] - others / (len(rewards[g]) - 1)


def reinforce_pp(rewards, i, g):
    """REINFORCE++: over the batch's mean, in its deviations."""
    flat = [reward for each in rewards for reward in each]
    return (rewards[g][i] - sum(flat) / len(flat)) / deviation(flat)


FORMULAS = {("group", "dapo"): group, ("group", "dr_grpo"): unscaled, ("rloo", "dapo"): rloo, ("reinforce_pp", "dapo"): reinforce_pp}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("kind", "loss"), FORMULAS)
def test_an_advantage_is_its_papers_formula(kind, loss, seed):
    chance = random.Random(seed)
    rewards = [[chance.uniform(-1, 1) for _ in range(size)] for size in (4, 3, 8)]

    found = advantages_of(kind, rewards, loss=loss)

    for g, each in enumerate(rewards):
        for i in range(len(each)):
            # 1e-6 beside the deviation keeps it off zero
            assert found[g][i] == pytest.approx(FORMULAS[kind, loss](rewards, i, g), rel=2e-5)


def test_every_kind_of_the_config_is_among_them():
    assert {kind for kind, _ in FORMULAS} == set(ADVANTAGES)


@pytest.mark.parametrize("kind", [group_advantages, rloo_advantages])
def test_a_group_without_spread_teaches_nothing(kind):
    assert kind([0.7, 0.7, 0.7]) == [0.0, 0.0, 0.0]
    assert kind([0.3, 0.1 + 0.2]) == [0.0, 0.0]


def test_over_the_batch_a_group_without_spread_teaches_too():
    assert batch_advantages([[1.0, 1.0], [0.0, 0.0]]) == [
        pytest.approx([0.866, 0.866], abs=1e-3),
        pytest.approx([-0.866, -0.866], abs=1e-3),
    ]
    assert batch_advantages([[1.0, 1.0], [1.0]]) == [[0.0, 0.0], [0.0]]


@pytest.mark.parametrize("kind", [group_advantages, rloo_advantages])
def test_a_single_member_has_no_advantage(kind):
    assert kind([1.0]) == [0.0]


def test_a_member_without_a_score_is_not_in_the_statistics():
    """It is absent, not 0: the others' advantages are those of a smaller group."""
    scored = group_advantages([1.0, 1.0, 0.0])

    assert scored == pytest.approx([0.577349, 0.577349, -1.154699], rel=1e-5)
    assert scored != pytest.approx(group_advantages([1.0, 1.0, 0.0, 0.0])[:3], rel=1e-2)
