"""Draws the next token of every row at once; a row's draw depends on its seed and position, never on its neighbours."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Draw(NamedTuple):
    """How one row's token is drawn: `uniform` in [0, 1) picks it from the distribution; temperature 0 is greedy."""

    temperature: float
    top_p: float
    uniform: float


def sample(logits_RV: Tensor, draws: Sequence[Draw]) -> tuple[list[int], list[float]]:
    """Token id and log-probability per row of float32 `logits_RV`.

    Log-probabilities are of the full softmax at temperature 1, whatever temperature and top_p the token was drawn with.
    """
    device = logits_RV.device
    if all(draw.temperature == 0.0 for draw in draws):
        chosen = logits_RV.argmax(-1, keepdim=True)
    else:
        temperature, top_p, number = torch.tensor(draws, dtype=torch.float32).t().unsqueeze(-1).to(device)
        scaled = logits_RV
        if any(draw.temperature != 1.0 for draw in draws):
            scaled = logits_RV / temperature.masked_fill(temperature == 0.0, 1.0)
        probs = scaled.softmax(-1)
        if any(draw.top_p < 1.0 for draw in draws):
            probs = _nucleus(probs, top_p)
        chosen = _pick(probs, number)
        if any(draw.temperature == 0.0 for draw in draws):
            chosen = torch.where(temperature == 0.0, logits_RV.argmax(-1, keepdim=True), chosen)
    logprobs = logits_RV.gather(-1, chosen) - logits_RV.logsumexp(-1, keepdim=True)
    both = torch.cat((chosen.double(), logprobs.double()), -1).t().tolist()
    return [int(token) for token in both[0]], both[1]


def _pick(probs_RV: Tensor, number_R1: Tensor) -> Tensor:
    """The first token whose cumulative probability exceeds `number` of the total: never one of probability 0."""
    cumulative = probs_RV.cumsum(-1)
    total = cumulative[:, -1:]
    target = torch.minimum(number_R1 * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cumulative, target, right=True)


def _nucleus(probs_RV: Tensor, top_p_R1: Tensor) -> Tensor:
    """Zero what lies outside the smallest set of most probable tokens that reaches top_p; rows with top_p 1 keep all."""
    ordered, order = probs_RV.sort(-1, descending=True)
    before = ordered.cumsum(-1) - ordered
    outside = (before >= top_p_R1) & (top_p_R1 < 1.0)
    outside[:, 0] = False
    return probs_RV.masked_fill(torch.zeros_like(outside).scatter_(-1, order, outside), 0.0)
