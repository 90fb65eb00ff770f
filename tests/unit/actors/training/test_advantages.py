import pytest

from actors.training.losses import group_advantages


def test_advantages_are_rewards_normalised_within_the_group():
    rewards = [0.0, 0.0, 1.0, 1.0]

    advantages = group_advantages(rewards)

    # mean 0.5, sample deviation sqrt(4 * 0.25 / 3) = 0.57735
    assert advantages == pytest.approx([-0.866024, -0.866024, 0.866024, 0.866024], rel=1e-5)


def test_a_group_without_spread_teaches_nothing():
    assert group_advantages([0.7, 0.7, 0.7]) == [0.0, 0.0, 0.0]


def test_a_single_member_has_no_advantage():
    assert group_advantages([1.0]) == [0.0]


def test_a_member_without_a_score_is_not_in_the_statistics():
    """It is absent, not 0: the others' advantages are those of a smaller group."""
    scored = group_advantages([1.0, 1.0, 0.0])

    assert scored == pytest.approx([0.577349, 0.577349, -1.154699], rel=1e-5)
    assert scored != pytest.approx(group_advantages([1.0, 1.0, 0.0, 0.0])[:3], rel=1e-2)
