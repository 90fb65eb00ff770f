"""Group-relative advantages: how much better a trajectory did than its siblings on the same task."""

from collections.abc import Sequence

SPREAD = 1e-6
"""A group whose rewards differ by less teaches nothing: its advantages are exactly zero."""


def group_advantages(rewards_G: Sequence[float]) -> list[float]:
    """(reward - mean) / standard deviation within one group of G rewards; zeros where there is no spread.

    Source: DeepSeekMath (GRPO), section 4.1, outcome supervision; the deviation is the sample one (G - 1).
    """
    count = len(rewards_G)
    mean = sum(rewards_G) / count
    if count < 2 or max(rewards_G) - min(rewards_G) < SPREAD:
        return [0.0] * count
    deviation = (sum((r - mean) ** 2 for r in rewards_G) / (count - 1)) ** 0.5
    return [(r - mean) / (deviation + SPREAD) for r in rewards_G]
