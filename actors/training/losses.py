"""Losses, advantages and importance weights as pure functions, each with its source; docs/learning.md has the formulas.

Shapes: N sampled tokens of one micro-batch; G rollouts of a group. π is the policy that learns, μ the one that sampled, p the proximal
policy, around which ratios are clipped. `sequence_N` numbers each token's sequence from 0; a micro-batch holds whole sequences.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch

from actors.messages.samples import SPREAD, has_spread

Rewards = Sequence[Sequence[float]]
"""Of each group of a batch, in the order of its rollouts."""

# -- advantages ------------------------------------------------------------------------------------------------------


def group_advantages(rewards_G: Sequence[float], *, scaled: bool = True) -> list[float]:
    """(reward - mean) / standard deviation within one group; zeros where there is no spread. Without `scaled` it stays reward - mean.

    Source: DeepSeekMath (arXiv 2402.03300), section 4.1.2, outcome supervision; the deviation is the sample one (G - 1). Unscaled:
    Dr. GRPO (arXiv 2503.20783), section 3.2.
    """
    count = len(rewards_G)
    mean = sum(rewards_G) / count
    if not has_spread(rewards_G):
        return [0.0] * count
    if not scaled:
        return [r - mean for r in rewards_G]
    deviation = (sum((r - mean) ** 2 for r in rewards_G) / (count - 1)) ** 0.5
    return [(r - mean) / (deviation + SPREAD) for r in rewards_G]


def rloo_advantages(rewards_G: Sequence[float]) -> list[float]:
    """reward - mean of the group's other rewards; zeros where there is no spread.

    Source: REINFORCE leave-one-out, Back to Basics (arXiv 2402.14740), its RLOO estimator.
    """
    if not has_spread(rewards_G):
        return [0.0] * len(rewards_G)
    total = sum(rewards_G)
    return [r - (total - r) / (len(rewards_G) - 1) for r in rewards_G]


def batch_advantages(rewards: Rewards) -> list[list[float]]:
    """(reward - mean) / standard deviation over the whole batch, whatever the groups; zeros where the batch has no spread.

    Source: REINFORCE++ (arXiv 2501.03262), global advantage normalisation, without its divergence in the reward: that is `kl_coef` here.
    """
    flat = group_advantages([r for rewards_G in rewards for r in rewards_G])
    found = iter(flat)
    return [[next(found) for _ in rewards_G] for rewards_G in rewards]


def advantages_of(kind: str, rewards: Rewards, *, loss: str) -> list[list[float]]:
    """What `train.advantage=kind` makes of the rewards of a batch. With the loss dr_grpo a group's advantages are not scaled."""
    if kind == "reinforce_pp":
        return batch_advantages(rewards)
    if kind == "rloo":
        return [rloo_advantages(rewards_G) for rewards_G in rewards]
    return [group_advantages(rewards_G, scaled=loss != "dr_grpo") for rewards_G in rewards]


# -- losses ----------------------------------------------------------------------------------------------------------


class TokenLoss(NamedTuple):
    """`loss_N` is what each token adds, to be weighed by `token_weights`; `clipped_N` is 1 where the upper clip decides it, -1 where
    the lower one does, and else 0."""

    loss_N: torch.Tensor
    clipped_N: torch.Tensor


def clipped_loss(
    logprobs_N: torch.Tensor,
    proximal_N: torch.Tensor,
    advantages_N: torch.Tensor,
    sequence_N: torch.Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> TokenLoss:
    """-min(r·A, clip(r, 1 - low, 1 + high)·A) with r = π/p of the token: of GRPO, Dr. GRPO and DAPO, which differ in the tokens' weights.

    Sources: PPO (arXiv 1707.06347), section 3; its two separate bounds: DAPO (arXiv 2503.14476), section 3.1.
    """
    return _clipped((logprobs_N - proximal_N).exp(), advantages_N, clip_low, clip_high)


def dual_clipped_loss(
    logprobs_N: torch.Tensor,
    proximal_N: torch.Tensor,
    advantages_N: torch.Tensor,
    sequence_N: torch.Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float,
) -> TokenLoss:
    """As `clipped_loss`, but where A < 0 no more than -dual_clip·A: a ratio far above 1 pushes no harder than that.

    Source: Mastering Complex Control in MOBA Games (arXiv 1912.09729), the dual-clip PPO objective.
    """
    loss_N, clipped_N = _clipped((logprobs_N - proximal_N).exp(), advantages_N, clip_low, clip_high)
    most_N = -dual_clip * advantages_N
    beyond_N = (advantages_N < 0) & (loss_N > most_N)
    return TokenLoss(torch.where(beyond_N, most_N, loss_N), clipped_N.masked_fill(beyond_N, 1.0))


def gspo_loss(
    logprobs_N: torch.Tensor,
    proximal_N: torch.Tensor,
    advantages_N: torch.Tensor,
    sequence_N: torch.Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> TokenLoss:
    """As `clipped_loss` with one ratio per sequence: exp of the mean of ln(π/p) over its tokens; each token carries its sequence's loss.

    Source: GSPO (arXiv 2507.18071), section 4.1.
    """
    difference_N = logprobs_N - proximal_N
    ones_N = torch.ones_like(difference_N)
    mean_N = _sums(difference_N, sequence_N) / _sums(ones_N, sequence_N)
    return _clipped(mean_N.exp(), advantages_N, clip_low, clip_high)


def cispo_loss(
    logprobs_N: torch.Tensor,
    proximal_N: torch.Tensor,
    advantages_N: torch.Tensor,
    sequence_N: torch.Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> TokenLoss:
    """-w·A·ln π with the constant w = clip(π/p, 1 - low, 1 + high): every token keeps a gradient, clipped or not.

    Source: MiniMax-M1 (arXiv 2506.13585), section 3.1.
    """
    ratio_N = (logprobs_N.detach() - proximal_N).exp()
    held_N = ratio_N.clamp(1.0 - clip_low, 1.0 + clip_high)
    return TokenLoss(-held_N * advantages_N * logprobs_N, (ratio_N - held_N).sign())


def _clipped(ratio_N: torch.Tensor, advantages_N: torch.Tensor, clip_low: float, clip_high: float) -> TokenLoss:
    free_N, held_N = ratio_N * advantages_N, ratio_N.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages_N
    side_N = (ratio_N.detach() - 1.0).sign() * (free_N > held_N)
    return TokenLoss(-torch.minimum(free_N, held_N), side_N)


LOSSES: Mapping[str, Callable[..., TokenLoss]] = {
    "grpo": clipped_loss,
    "dr_grpo": clipped_loss,
    "dapo": clipped_loss,
    "gspo": gspo_loss,
    "cispo": cispo_loss,
    "ppo": dual_clipped_loss,
}
"""`train.loss` → what a token adds."""


def token_weights(loss: str, counts_S: Sequence[int], lengths_S: Sequence[int], *, budget: int) -> list[float]:
    """What each token of sequence s counts in the loss of a minibatch, of which this is told the S sequences, all of them.

    `counts_S` are the trained tokens of each; `lengths_S` those of the trajectory that it is part of, whose number is T.
    grpo, gspo: 1/(length·T), the mean over trajectories of the mean over tokens (DeepSeekMath, section 4.1.1; GSPO, section 4.1).
    dr_grpo: 1/(budget·T) (Dr. GRPO, section 3.2). All others, one's own too: 1/tokens (DAPO, section 3.3).
    """
    trajectories = sum(count / length for count, length in zip(counts_S, lengths_S, strict=True) if count)
    if loss in ("grpo", "gspo"):
        return [1.0 / (length * trajectories) if length else 0.0 for length in lengths_S]
    if loss == "dr_grpo":
        return [1.0 / (budget * max(1.0, trajectories))] * len(counts_S)
    return [1.0 / max(1, sum(counts_S))] * len(counts_S)


# -- between policies ------------------------------------------------------------------------------------------------

MOST_LOG_WEIGHT = 20.0
"""Importance weights end at e^±20, so that sums of their squares stay finite in float32."""


def importance_weights(
    policy_N: torch.Tensor, behaviour_N: torch.Tensor, sequence_N: torch.Tensor, *, level: str
) -> torch.Tensor:
    """π/μ of each token, or with level=sequence the product of these over its sequence; from log-probabilities.

    Source: decoupled objective, Batch size-invariance (arXiv 2110.00641), section 3, and AReaL (arXiv 2505.24298), section 5.2.
    """
    difference_N = policy_N - behaviour_N
    if level == "sequence":
        difference_N = _sums(difference_N, sequence_N)
    return difference_N.clamp(-MOST_LOG_WEIGHT, MOST_LOG_WEIGHT).exp()


def bounded(weights_N: torch.Tensor, *, mode: str, cap: float) -> torch.Tensor:
    """truncate: min(w, cap); mask: w, and 0 where it is above `cap`.

    Sources: truncation, IMPALA (arXiv 1802.01561), section 4.1; masking, IcePop in Every Step Evolves (arXiv 2510.18855), its upper bound.
    """
    return weights_N.clamp(max=cap) if mode == "truncate" else torch.where(weights_N <= cap, weights_N, 0.0)


def k3(log_ratio_N: torch.Tensor) -> torch.Tensor:
    """r - 1 - ln r of each token, never negative: its mean over samples of q estimates KL(q ‖ p) for r = p/q.

    Source: Schulman, Approximating KL Divergence (2020), the estimator k3; as a loss: DeepSeekMath, section 4.1.1, equation 4.
    """
    return log_ratio_N.exp() - 1.0 - log_ratio_N


def _sums(values_N: torch.Tensor, sequence_N: torch.Tensor) -> torch.Tensor:
    """Of each token's sequence."""
    if not len(values_N):
        return values_N
    sums_S = values_N.new_zeros(int(sequence_N.max()) + 1).index_add(0, sequence_N, values_N)
    return sums_S[sequence_N]
