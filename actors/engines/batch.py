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
    slots: list[int] = []
    last: list[int] = []
    num_single = 0
    for sequence, start, end in rows:
        if end - start == 1:
            num_single += 1
            ids.append(sequence.tokens[start])
            positions.append(start)
            slots.append(sequence.slot)
        else:
            ids += sequence.tokens[start:end]
            positions += range(start, end)
            slots += [sequence.slot] * (end - start)
        if end == len(sequence.tokens):
            last.append(len(ids) - 1)
    table = np.array((ids, positions, slots), np.int64)
    dense = _dense(table[2, :num_single], table[1, :num_single] + 1, shape)
    loose = rows if dense is None else rows[num_single:]
    pieces = _pieces(loose, 0 if dense is None else num_single, shape)
    table[2] = table[2] * shape.max_len + table[1]
    on_device = torch.from_numpy(table).to(shape.device)
    everywhere = len(last) == len(ids)
    chosen = None if everywhere else torch.tensor(last, dtype=torch.int64, device=shape.device)
    return Batch(on_device[0], on_device[1], on_device[2], dense, pieces, chosen)


def _dense(slots: np.ndarray, ends: np.ndarray, shape: Shape) -> Dense | None:
    """Attend over a whole range of slots in one call when that reads less than row by row would cost."""
    num = len(slots)
    if num < 2:
        return None
    first, last, length = int(slots[0]), int(slots[-1]) + 1, int(ends.max())
    width = shape.kv_width / 64
    apart = num * CALL_POSITIONS + width * int(ends.sum())
    if shape.device.type == "cpu" and width * (last - first) * length / shape.threads > apart:
        return None
    index, held = None, ends
    if num < last - first:
        held = np.ones(last - first, np.int64)
        held[slots - first] = ends
        index = torch.from_numpy(slots - first).to(shape.device)
    hidden = np.arange(length) >= held[:, None]
    mask = torch.zeros(hidden.shape, dtype=shape.dtype).masked_fill_(torch.from_numpy(hidden), -torch.inf)
    return Dense(num, first, last, length, index, mask.to(shape.device).view(last - first, 1, 1, length))


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
