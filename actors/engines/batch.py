"""One step's tokens as tensors: single-token rows first, then the longer pieces, packed without padding."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from actors.engines.scheduler import Row

CALL_POSITIONS = 200
"""A separate attention call costs about as much as reading this many KV positions of 64 floats (measured: 6 µs)."""


class Dense(NamedTuple):
    """Single-token rows that attend together, over the neighbouring slots [first, last); the mask hides what is not theirs."""

    num_rows: int
    first: int
    last: int
    length: int
    places: Tensor | None
    """[num_rows] slot - first of each row; None when every slot of the range takes part."""
    mask: Tensor
    """[last - first, 1, 1, length], 0 or -inf."""


class Piece(NamedTuple):
    """Packed tokens [begin, end) of one slot, which attend over its first `length` positions."""

    begin: int
    end: int
    slot: int
    length: int
    causal: bool
    mask: Tensor | None
    """[end - begin, length], for a piece that continues a cached history."""


class Batch(NamedTuple):
    """T packed tokens of one step."""

    ids: Tensor
    positions: Tensor
    rows: Tensor
    """[T] where each token's key and value go: slot · max_len + position."""
    dense: Dense | None
    pieces: tuple[Piece, ...]
    last: Tensor | None
    """[R] the tokens after which one is sampled; None when that is all of them, in order."""


class Shape(NamedTuple):
    """What decides how attention is split: KV floats per position (K·D), threads, and the cache's slot length."""

    max_len: int
    kv_width: int
    threads: int
    device: torch.device
    dtype: torch.dtype


def arrange(rows: Sequence[Row]) -> list[Row]:
    """The order in which a batch packs them."""
    return sorted(rows, key=lambda row: (row.end - row.start > 1, row.sequence.slot))


def build(rows: Sequence[Row], shape: Shape) -> Batch:
    """Tensors for `rows`, which `arrange` ordered."""
    ids: list[int] = []
    positions: list[int] = []
    places: list[int] = []
    last: list[int] = []
    for sequence, start, end in rows:
        ids += sequence.tokens[start:end]
        positions += range(start, end)
        base = sequence.slot * shape.max_len
        places += range(base + start, base + end)
        if end == len(sequence.tokens):
            last.append(len(ids) - 1)
    table = torch.from_numpy(np.array((ids, positions, places), np.int64)).to(shape.device)
    num_single = sum(1 for row in rows if row.end - row.start == 1)
    dense = _dense(rows[:num_single], shape)
    loose = rows if dense is None else rows[num_single:]
    pieces = _pieces(loose, 0 if dense is None else num_single, shape)
    everywhere = len(last) == len(ids)
    chosen = None if everywhere else torch.tensor(last, dtype=torch.int64, device=shape.device)
    return Batch(table[0], table[1], table[2], dense, pieces, chosen)


def _dense(rows: Sequence[Row], shape: Shape) -> Dense | None:
    """Attend over a whole range of slots in one call when that reads less than row by row would cost."""
    if len(rows) < 2:
        return None
    first, last = rows[0].sequence.slot, rows[-1].sequence.slot + 1
    length = max(row.end for row in rows)
    width = shape.kv_width / 64
    apart = len(rows) * CALL_POSITIONS + width * sum(row.end for row in rows)
    if shape.device.type == "cpu" and width * (last - first) * length / shape.threads > apart:
        return None
    ends = np.ones(last - first, np.int64)
    places = [row.sequence.slot - first for row in rows]
    ends[places] = [row.end for row in rows]
    hidden = np.arange(length) >= ends[:, None]
    mask = torch.from_numpy(np.where(hidden, np.float32(-np.inf), np.float32(0))).to(shape.device, shape.dtype)
    index = None if len(rows) == last - first else torch.tensor(places, device=shape.device)
    return Dense(len(rows), first, last, length, index, mask.view(last - first, 1, 1, length))


def _pieces(rows: Sequence[Row], begin: int, shape: Shape) -> tuple[Piece, ...]:
    pieces: list[Piece] = []
    for sequence, start, end in rows:
        num = end - start
        mask = None
        if start and num > 1:
            mask = torch.full((num, end), -torch.inf, dtype=shape.dtype, device=shape.device).triu_(start + 1)
        pieces.append(Piece(begin, begin + num, sequence.slot, end, num > 1 and not start, mask))
        begin += num
    return tuple(pieces)
