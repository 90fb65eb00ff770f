"""GRPO: advantages within a group, the policy-gradient loss, and what is measured beside it. Shapes: G rollouts of a group, N tokens of
one minibatch."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

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


class PolicyLoss(NamedTuple):
    """`total` is the sum over tokens, to be divided by the minibatch's token count; the rest are detached sums."""

    total: torch.Tensor
    ratio: torch.Tensor
    kl: torch.Tensor
    clipped: torch.Tensor


def clipped_policy_loss(
    logprobs_N: torch.Tensor,
    behaviour_N: torch.Tensor,
    advantages_N: torch.Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> PolicyLoss:
    """-Σ min(r·A, clip(r, 1-low, 1+high)·A) with r = exp(logprob - behaviour logprob), per token.

    Sources: PPO (clipping), GRPO (group advantages), DAPO section 3.1 and 3.3 (separate upper clip, token-level mean).
    `kl` is the k3 estimator of KL(behaviour ‖ policy): r - 1 - ln r.
    """
    difference_N = logprobs_N - behaviour_N
    ratio_N = difference_N.exp()
    held_N = ratio_N.clamp(1.0 - clip_low, 1.0 + clip_high)
    total = -torch.minimum(ratio_N * advantages_N, held_N * advantages_N).sum()
    with torch.no_grad():
        kl = (ratio_N - 1.0 - difference_N).sum()
        clipped = ((ratio_N * advantages_N) > (held_N * advantages_N)).sum()
        return PolicyLoss(total, ratio_N.detach().sum(), kl, clipped)
