"""The reward functions that come along."""

from rubato.actors.rewards.functions import malformed_penalty


def test_the_penalty_is_the_share_of_turns_without_an_action():
    assert malformed_penalty(["", "", ""], turns=[4, 2, 0], invalid_turns=[1, 2, 0], task=[1, 2, 3]) == [-0.025, -0.1, -0.0]
