"""What moves an adapter where others say when: gradients of sums gather, call by call, until a step of AdamW takes them."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rubato.actors.training import forward
from rubato.actors.training.torch_train import pack

SumLoss = Callable[[Tensor, Mapping[str, Tensor], Tensor], Tensor]
"""What each of N targets adds to a sum: from its log-probability, from what the loss wants to know of it by name, and from the number of its
sequence, which counts from 0. All of a sequence comes in one call."""


class TargetSequence(NamedTuple):
    """A model's input of T tokens, and K targets for each: after the tokens up to it, how likely is the target? Tensors of shape [T, K]."""

    tokens: Tensor
    """[T]"""
    targets: Tensor
    inputs: Mapping[str, Tensor]


class TargetsSeen(NamedTuple):
    """Of one sequence, both [T, K] float32."""

    logprobs: Tensor
    losses: Tensor


class AdamStep(NamedTuple):
    """Of one step of AdamW. Source: Decoupled Weight Decay Regularization (arXiv 1711.05101), algorithm 2."""

    lr: float
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-12
    weight_decay: float = 0.0
    max_grad_norm: float = 0.0
    """0 clips none."""


def add_gradient(
    model: Any,
    masters: Sequence[torch.nn.Parameter],
    sequences: Sequence[TargetSequence],
    loss: SumLoss,
    *,
    micro_batch_tokens: int,
    backward: bool = True,
) -> list[TargetsSeen]:
    """Add the gradient of the sum of `loss` over `sequences` to that of `masters`, which move the model; or leave it, without `backward`.

    The gradient is all there when this returns, and as it was when it raises. What is seen lies on the CPU.
    """
    before = [master.grad for master in masters]
    for master in masters:
        master.grad = None
    seen: list[TargetsSeen | None] = [None] * len(sequences)
    with ExitStack() as undo:
        undo.callback(_put_back, masters, before)
        with nullcontext() if backward else torch.no_grad():
            for run in pack([len(each.tokens) for each in sequences], micro_batch_tokens, padded=not forward.packs(model)):
                for index, found in zip(run, _micro_batch(model, [sequences[i] for i in run], loss, backward=backward), strict=True):
                    seen[index] = found
        undo.pop_all()
    for master, grad in zip(masters, before, strict=True):
        if grad is not None:
            master.grad = grad if master.grad is None else grad.add_(master.grad)
    return [each for each in seen if each is not None]


def _put_back(masters: Sequence[torch.nn.Parameter], gradients: Sequence[torch.Tensor | None]) -> None:
    for master, gradient in zip(masters, gradients, strict=True):
        master.grad = gradient


def _micro_batch(model: Any, sequences: Sequence[TargetSequence], loss: SumLoss, *, backward: bool) -> list[TargetsSeen]:
    head = model.get_output_embeddings()
    device = head.weight.device
    row = forward.row_of([len(each.tokens) for each in sequences], device)
    begins = [0, *itertools.accumulate(row.lengths)]
    sizes = [each.targets.numel() for each in sequences]
    places = [
        begin + torch.arange(len(s.tokens)).repeat_interleave(s.targets.shape[1]) for begin, s in zip(begins, sequences, strict=False)
    ]
    rows_N = torch.repeat_interleave(torch.arange(len(sequences)), torch.tensor(sizes)).to(device)
    targets_N = torch.cat([each.targets.flatten() for each in sequences]).to(device)
    inputs_N = {name: torch.cat([each.inputs[name].flatten() for each in sequences]).to(device) for name in sequences[0].inputs}
    hidden_LD = forward.computed(model, torch.cat([each.tokens for each in sequences]).to(device), row).hidden_LD
    ones_N = torch.ones(len(targets_N), device=device)
    logprobs_N, _ = forward.token_logprobs(hidden_LD[torch.cat(places).to(device)], head, targets_N, ones_N)
    loss_N = loss(logprobs_N, inputs_N, rows_N)
    if backward:
        loss_N.sum().backward()
    both = [values_N.detach().float().cpu().split(sizes) for values_N in (logprobs_N, loss_N)]
    return [TargetsSeen(a.view(s.targets.shape), b.view(s.targets.shape)) for a, b, s in zip(*both, sequences, strict=True)]


def take_step(optimizer: torch.optim.Optimizer, masters: Sequence[torch.nn.Parameter], step: AdamStep) -> float:
    """Move `masters` by their gradients, of which one that there is not counts as 0; they stay. Returns the norm before it was clipped.

    A norm that is not finite moves nothing.
    """
    for group in optimizer.param_groups:
        group.update(lr=step.lr, betas=step.betas, eps=step.eps, weight_decay=step.weight_decay)
    for master in masters:
        if master.grad is None:
            master.grad = torch.zeros_like(master)
    norm = float(torch.nn.utils.clip_grad_norm_(masters, step.max_grad_norm or torch.inf))
    if norm < torch.inf:
        optimizer.step()
    return norm


class Scores(NamedTuple):
    """Of a sequence of T tokens: what the model gave each, [T], the first of which is NaN, and its likeliest, [T, top]; all on the CPU."""

    logprobs: Tensor
    top_ids: Tensor
    """-1 for the first."""
    top_logprobs: Tensor


def score(model: Any, tokens: Tensor, top: int) -> Scores:
    """Log-probabilities of a sequence."""
    head = model.get_output_embeddings()
    device = head.weight.device
    with torch.inference_mode():
        row = forward.row_of([len(tokens)], device)
        hidden_ND = forward.computed(model, tokens.to(device), row).hidden_LD[:-1]
        ones_N = torch.ones(len(hidden_ND), device=device)
        logprobs_N, _ = forward.token_logprobs(hidden_ND, head, tokens[1:].to(device), ones_N)
        chosen = [forward.likeliest(hidden_ND[part], head, top) for part in forward.chunks(hidden_ND, head.weight)] if top else []
    none = torch.full((1, top), -1), torch.full((1, top), torch.nan)
    ids, values = (torch.cat([first, *(each[i].cpu() for each in chosen)]) for i, first in enumerate(none))
    return Scores(torch.cat([torch.full((1,), torch.nan), logprobs_N.float().cpu()]), ids, values)
