"""Losses beside GRPO's, each loaded where `train.loss` names it; see losses.py."""

from collections.abc import Mapping
from typing import Any, cast

import torch

from rubato.actors.training.losses import TokenLoss, clipped, sequence_sums
from rubato.actors.training.train_engine import TrainError


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
    loss_N, clipped_N = clipped((logprobs_N - proximal_N).exp(), advantages_N, clip_low, clip_high)
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
    mean_N = sequence_sums(difference_N, sequence_N) / sequence_sums(ones_N, sequence_N)
    return clipped(mean_N.exp(), advantages_N, clip_low, clip_high)


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


def own_loss(name: str, own: Any, clips: Mapping[str, Any], *tensors_N: torch.Tensor) -> TokenLoss:
    """A user's function: it gets what ours get, and returns [N] numbers, or such and where it clipped."""
    try:
        found = own(*tensors_N, **clips)
    except Exception as error:
        raise TrainError(f"train.loss={name} raised {type(error).__name__}: {error}") from error
    loss_N, clipped_N = cast("Any", found) if isinstance(found, tuple) else (found, torch.zeros_like(tensors_N[0]))
    if not isinstance(loss_N, torch.Tensor) or loss_N.shape != tensors_N[0].shape or not loss_N.requires_grad:
        what = tuple(loss_N.shape) if isinstance(loss_N, torch.Tensor) else type(loss_N).__name__
        wanted = f"one number with a gradient for each of the {len(tensors_N[0])} tokens"
        raise TrainError(f"train.loss={name} returned {what}, not {wanted}")
    return TokenLoss(loss_N, clipped_N)
