"""Tinker's losses: sums over tokens, as its documentation has them (tinker-docs.thinkingmachines.ai, losses), with its defaults.

N targets of one micro-batch, which holds whole sequences: p is the model that learns, q the one that sampled (`logprobs`), A the advantages.
`rows_N` numbers each target's sequence. Bounds of ratios are ratios themselves, and may differ from token to token.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from rubato.actors.training.losses import sequence_sums

Inputs = Mapping[str, Tensor]
"""By the name that the client gives it; [N] each."""

LossOf = Callable[[Tensor, Inputs, Tensor], Tensor]

LOW, HIGH, BETA, RATIO_MASK = "clip_low_threshold", "clip_high_threshold", "beta", "sequence_ratio_mask"


class Loss(NamedTuple):
    """`function` tells what each target adds, before it is multiplied by its `weights`."""

    function: LossOf
    needs: tuple[str, ...] = ("logprobs", "advantages")
    """Inputs that each datum has to have beside `target_tokens`."""
    config: Mapping[str, float] = {}
    """What loss_fn_config may set for all tokens at once, and its defaults."""
    may: tuple[str, ...] = ()
    """Inputs that a datum may have beside `weights`: bounds of its own, which go before loss_fn_config's, and what marks tokens."""
    most_targets: int | None = 1
    """For each token; None: any number."""


def loss_of(loss: Loss) -> LossOf:
    """What each target adds to the sum."""
    return lambda logprobs_N, inputs, rows_N: loss.function(logprobs_N, inputs, rows_N) * inputs["weights"]


def cross_entropy(logprobs_N: Tensor, inputs: Inputs, rows_N: Tensor) -> Tensor:
    """-ln p. Gradients that a client computed itself come this way too: they are `weights` then, their sign turned."""
    return -logprobs_N


def importance_sampling(logprobs_N: Tensor, inputs: Inputs, rows_N: Tensor) -> Tensor:
    """-(p/q)·A."""
    return -_ratio(logprobs_N, inputs) * inputs["advantages"]


def ppo(logprobs_N: Tensor, inputs: Inputs, rows_N: Tensor) -> Tensor:
    """-min(r·A, clip(r, low, high)·A) with r = p/q. Source: PPO (arXiv 1707.06347), section 3."""
    return _clipped(_ratio(logprobs_N, inputs), inputs)


def cispo(logprobs_N: Tensor, inputs: Inputs, rows_N: Tensor) -> Tensor:
    """-clip(p/q, low, high)·A·ln p, the first a constant. Source: MiniMax-M1 (arXiv 2506.13585), section 3.1."""
    return -_held(_ratio(logprobs_N.detach(), inputs), inputs) * inputs["advantages"] * logprobs_N


def dro(logprobs_N: Tensor, inputs: Inputs, rows_N: Tensor) -> Tensor:
    """-(A·ln p - beta/2·(ln p/q)²). Source: Kimi k1.5 (arXiv 2501.12599), section 2.3.2."""
    return inputs[BETA] / 2 * (logprobs_N - inputs["logprobs"]).square() - inputs["advantages"] * logprobs_N


def gspo(logprobs_N: Tensor, inputs: Inputs, rows_N: Tensor) -> Tensor:
    """As `ppo`, where each token's ratio has the value of its sequence's, exp of the mean of ln p/q over tokens that `sequence_ratio_mask` marks,
    and the gradient of its own. Source: GSPO (arXiv 2507.18071), section 4.3, GSPO-token.
    """
    counted_N = (inputs[RATIO_MASK] != 0).to(logprobs_N.dtype)
    difference_N = torch.where(counted_N > 0, logprobs_N.detach() - inputs["logprobs"], 0.0)
    mean_N = sequence_sums(difference_N, rows_N) / sequence_sums(counted_N, rows_N).clamp(min=1.0)
    return _clipped((mean_N + logprobs_N - logprobs_N.detach()).exp(), inputs)


def _ratio(logprobs_N: Tensor, inputs: Inputs) -> Tensor:
    return (logprobs_N - inputs["logprobs"]).exp()


def _held(ratio_N: Tensor, inputs: Inputs) -> Tensor:
    return torch.minimum(torch.maximum(ratio_N, inputs[LOW]), inputs[HIGH])


def _clipped(ratio_N: Tensor, inputs: Inputs) -> Tensor:
    return -torch.minimum(ratio_N * inputs["advantages"], _held(ratio_N, inputs) * inputs["advantages"])


LOSSES: Mapping[str, Loss] = {
    "cross_entropy": Loss(cross_entropy, needs=(), most_targets=None),
    "importance_sampling": Loss(importance_sampling),
    "ppo": Loss(ppo, config={LOW: 0.8, HIGH: 1.2}, may=(LOW, HIGH)),
    "cispo": Loss(cispo, config={LOW: 0.0, HIGH: 4.0}, may=(LOW, HIGH)),
    "dro": Loss(dro, config={BETA: 0.05}),
    "gspo": Loss(gspo, config={LOW: 0.8, HIGH: 1.2}, may=(LOW, HIGH, RATIO_MASK)),
}
"""By the names of the SDK."""
