"""Draws the next token of every row at once; a row's draw depends on its seed and position, never on its neighbours."""

from collections import abc

import numpy as np
import torch
from torch import Tensor

from actors.engines.chance import uniform
from actors.engines.sequence import Sequence

_LARGEST = 1 - 2.0**-23
"""Times any total, this is less than the total in float32: the largest number still names a token that has a probability."""


def draws_of(sequences: abc.Sequence[Sequence]) -> np.ndarray:
    """[R, 3] float32, how each row's next token is drawn: temperature (0 is greedy), top_p, and the number that picks it."""
    keys = np.array([sequence.key for sequence in sequences], np.uint64)
    positions = np.array([len(sequence.tokens) for sequence in sequences], np.uint64)
    draws = np.empty((len(sequences), 3), np.float32)
    draws[:, :2] = [sequence.temperature_top_p for sequence in sequences]
    draws[:, 2] = uniform(keys, positions)
    return draws


def sample(logits_RV: Tensor, draws_R3: np.ndarray) -> tuple[list[int], list[float]]:
    """Token id and log-probability per row of float32 `logits_RV`, drawn as `draws_of` says.

    Log-probabilities are of the full softmax at temperature 1, whatever temperature and top_p the token was drawn with.
    """
    greedy = draws_R3[:, 0] == 0.0
    logprobs_RV = logits_RV.log_softmax(-1)
    if greedy.all():
        chosen = logits_RV.argmax(-1, keepdim=True)
    else:
        chosen = _drawn(logits_RV, logprobs_RV, draws_R3)
        if greedy.any():
            rows = torch.from_numpy(greedy).to(logits_RV.device).unsqueeze(-1)
            chosen = torch.where(rows, logits_RV.argmax(-1, keepdim=True), chosen)
    return chosen.squeeze(-1).tolist(), logprobs_RV.gather(-1, chosen).squeeze(-1).tolist()


def _drawn(logits_RV: Tensor, logprobs_RV: Tensor, draws_R3: np.ndarray) -> Tensor:
    """[R, 1] the first token whose cumulative probability exceeds `uniform` of the total: never one of probability 0."""
    temperature, top_p, number = torch.from_numpy(draws_R3).to(logits_RV.device).split(1, -1)
    if (draws_R3[:, 0] == 1.0).all():
        probs = logprobs_RV.exp()
    else:
        probs = (logits_RV / temperature.masked_fill(temperature == 0.0, 1.0)).softmax(-1)
    if (draws_R3[:, 1] < 1.0).any():
        probs = _nucleus(probs, top_p)
    cumulative = probs.cumsum(-1)
    return torch.searchsorted(cumulative, number.clamp(max=_LARGEST) * cumulative[:, -1:], right=True)


def _nucleus(probs_RV: Tensor, top_p_R1: Tensor) -> Tensor:
    """Zero what lies outside the smallest set of most probable tokens that reaches top_p; rows with top_p 1 keep all."""
    ordered, order = probs_RV.sort(-1, descending=True)
    before = ordered.cumsum(-1) - ordered
    outside = (before >= top_p_R1) & (top_p_R1 < 1.0)
    outside[:, 0] = False
    return probs_RV.masked_fill(torch.zeros_like(outside).scatter_(-1, order, outside), 0.0)
