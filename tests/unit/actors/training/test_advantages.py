import pytest

from actors.training.advantages import group_advantages


def test_advantages_are_rewards_normalised_within_the_group():
    rewards = [0.0, 0.0, 1.0, 1.0]

    advantages = group_advantages(rewards)

    # mean 0.5, sample deviation sqrt(4 * 0.25 / 3) = 0.57735
    assert advantages == pytest.approx([-0.866024, -0.866024, 0.866024, 0.866024], rel=1e-5)


def test_a_group_without_spread_teaches_nothing():
    assert group_advantages([0.7, 0.7, 0.7]) == [0.0, 0.0, 0.0]


def test_a_single_member_has_no_advantage():
    assert group_advantages([1.0]) == [0.0]
