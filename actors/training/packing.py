"""Packs sequences of unequal length into micro-batches with little padding. Pure; torch only builds the final tensors."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from actors.messages.samples import Trajectory
from bus.message import unpack_f32, unpack_i32, unpack_u8


class TokenSequence(NamedTuple):
    """One context to train on. Lists of equal length T; `trained` is 1 where the token was sampled by the policy."""

    tokens: list[int]
    trained: list[int]
    behaviour: list[float]
    fresh: list[int]
    """1 where the token was sampled under the weights that are being updated."""
    advantage: float


class MicroBatch(NamedTuple):
    """Right-padded: B sequences of T tokens. `rows_N, cols_N` point at the position *before* each of the N trained tokens."""

    tokens_BT: torch.Tensor
    rows_N: torch.Tensor
    cols_N: torch.Tensor
    targets_N: torch.Tensor
    behaviour_N: torch.Tensor
    advantages_N: torch.Tensor
    fresh_N: torch.Tensor


def sequences_of(trajectory: Trajectory, advantage: float, version: int) -> list[TokenSequence]:
    """A trajectory's segments. `version` is the weight version the update starts from."""
    found: list[TokenSequence] = []
    for segment in trajectory.segments:
        tokens = unpack_i32(segment.tokens)
        fresh = [0] * len(tokens)
        for span in segment.spans:
            if span.version == version:
                fresh[span.start : span.end] = [1] * (span.end - span.start)
        found.append(TokenSequence(tokens, unpack_u8(segment.mask), unpack_f32(segment.logprobs), fresh, advantage))
    return found


def pack(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Indices of `lengths`, longest first, cut into runs whose padded size (count × longest) stays within `max_tokens`.

    Every index appears exactly once; a sequence longer than `max_tokens` makes a run of its own.
    """
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    runs: list[list[int]] = []
    for index in order:
        if runs and (len(runs[-1]) + 1) * lengths[runs[-1][0]] <= max_tokens:
            runs[-1].append(index)
        else:
            runs.append([index])
    return runs


def micro_batch(sequences: Sequence[TokenSequence], device: torch.device) -> MicroBatch:
    """Pad and index. A sampled first token has nothing before it to predict it from, and is left out."""
    longest = max(len(s.tokens) for s in sequences)
    padded = [s.tokens + [0] * (longest - len(s.tokens)) for s in sequences]
    rows: list[int] = []
    cols: list[int] = []
    targets: list[int] = []
    behaviour: list[float] = []
    advantages: list[float] = []
    fresh: list[int] = []
    for row, sequence in enumerate(sequences):
        for position in (i for i, trained in enumerate(sequence.trained) if trained and i):
            rows.append(row)
            cols.append(position - 1)
            targets.append(sequence.tokens[position])
            behaviour.append(sequence.behaviour[position])
            advantages.append(sequence.advantage)
            fresh.append(sequence.fresh[position])
    return MicroBatch(
        torch.tensor(padded, device=device),
        torch.tensor(rows, device=device, dtype=torch.int64),
        torch.tensor(cols, device=device, dtype=torch.int64),
        torch.tensor(targets, device=device, dtype=torch.int64),
        torch.tensor(behaviour, device=device),
        torch.tensor(advantages, device=device),
        torch.tensor(fresh, device=device, dtype=torch.float32),
    )
