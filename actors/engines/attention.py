"""Attention over the KV cache: how one step's tokens are packed without padding, and where their keys and values lie."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from actors.engines.engine import EngineError
from actors.engines.hf_files import ModelConfig
from actors.engines.scheduler import Row

CALL_POSITIONS = 1000
"""A row that attends alone costs about as much more as reading this many KV positions of 64 floats (measured: 30 µs a layer)."""

SHORT = 64
"""Rows of up to this many tokens may attend together, padded to the longest."""

QUERIES = 8
"""This many queries on a KV position cost about as much as reading it."""


class RowGroup(NamedTuple):
    """Packed tokens [begin, end) of rows that attend together: a grid of B places with `width` queries each."""

    begin: int
    end: int
    width: int
    first: int
    last: int
    length: int
    slots: Tensor | None
    """[B] the slots to gather; None: B is the whole range [first, last), read in place."""
    places: Tensor | None
    """[end - begin] where each token stands in the flattened grid; None when they fill it in order."""
    mask: Tensor
    """[B, 1, width · queries per KV head, length] (or 1 for the third), 0 or -inf: hides what is not theirs."""


class Piece(NamedTuple):
    """Packed tokens [begin, end) of one slot, which attend over its first `length` positions."""

    begin: int
    end: int
    slot: int
    length: int
    causal: bool
    mask: Tensor | None
    """[end - begin, length], for a piece that continues a cached history."""


class PackedBatch(NamedTuple):
    """T packed tokens of one step."""

    ids: Tensor
    positions: Tensor
    rows: Tensor
    """[T] where each token's key and value go: slot · max_len + position."""
    groups: tuple[RowGroup, ...]
    """They come first, in order; then the pieces."""
    pieces: tuple[Piece, ...]
    last: Tensor | None
    """[R] the tokens after which one is sampled; None when that is all of them, in order."""


class AttentionShape(NamedTuple):
    """What decides how attention is split: the cache's slot length, KV floats per position (K·D), queries per KV head, threads."""

    max_len: int
    kv_width: int
    folded: int
    threads: int
    device: torch.device
    dtype: torch.dtype


def arrange(rows: Sequence[Row]) -> list[Row]:
    """The order in which a batch packs them: single tokens, short rows, long ones."""
    return sorted(rows, key=lambda row: (_kind(row.end - row.start), row.sequence.slot))


def _kind(num: int) -> int:
    return 0 if num == 1 else 1 if num <= SHORT else 2


def build(rows: Sequence[Row], shape: AttentionShape) -> PackedBatch:
    """Tensors for `rows`, which `arrange` ordered."""
    ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    last: list[int] = []
    for sequence, start, end in rows:
        if end - start == 1:
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
    table[2] = table[2] * shape.max_len + table[1]
    on_device = torch.from_numpy(table).to(shape.device)
    everywhere = len(last) == len(ids)
    chosen = None if everywhere else torch.tensor(last, dtype=torch.int64, device=shape.device)
    groups, loose = _groups(rows, shape)
    pieces = _pieces(loose, groups[-1].end if groups else 0, shape)
    return PackedBatch(on_device[0], on_device[1], on_device[2], groups, pieces, chosen)


def _groups(rows: Sequence[Row], shape: AttentionShape) -> tuple[tuple[RowGroup, ...], Sequence[Row]]:
    """The groups that are worth it, and the rows that are left. Those come after every group, or the order would not hold."""
    groups: list[RowGroup] = []
    begin = 0
    kinds = [_kind(row.end - row.start) for row in rows]
    singles, shorts = kinds.count(0), kinds.count(1)
    for num in (singles, shorts) if singles > 1 else (singles + shorts,):
        group = _group(rows[:num], begin, shape) if num > 1 else None
        if group is not None:
            groups.append(group)
            begin, rows = group.end, rows[num:]
        elif num:
            break
    return tuple(groups), rows


def _group(rows: Sequence[Row], begin: int, shape: AttentionShape) -> RowGroup | None:
    """Attend together when that costs less than row by row would: gathered, or as a range of slots where few are idle."""
    starts, ends, slots = np.array([(start, end, sequence.slot) for sequence, start, end in rows], np.int64).T
    sizes = ends - starts
    num, width, length = len(rows), int(sizes.max()), int(ends.max())
    first, last = int(slots.min()), int(slots.max()) + 1
    gathered = last - first > 2 * num
    floats = shape.kv_width / 64
    apart = num * CALL_POSITIONS + floats * float((ends * (1 + sizes / QUERIES)).sum())
    reads = 2 * num if gathered else last - first
    together = floats * (reads + num * width / QUERIES) * length
    if shape.device.type == "cpu" and together / shape.threads > apart:
        return None
    grid = np.arange(num) if gathered else slots - first
    held = np.zeros(num if gathered else last - first, np.int64)
    held[grid] = starts
    places = None
    if width > 1 or len(held) > num:
        within = np.arange(int(sizes.sum())) - np.repeat(sizes.cumsum() - sizes, sizes)
        places = torch.from_numpy(np.repeat(grid * width, sizes) + within).to(shape.device)
    index = torch.from_numpy(slots).to(shape.device) if gathered else None
    end = begin + int(sizes.sum())
    return RowGroup(begin, end, width, first, last, length, index, places, _mask(held, width, length, shape))


def _mask(starts: np.ndarray, width: int, length: int, shape: AttentionShape) -> Tensor:
    """Query j of a place sees the positions up to its start + j. Each is repeated for the heads folded into the query length."""
    hidden = np.arange(length) > (starts[:, None] + np.arange(width))[..., None]
    if width > 1:
        hidden = hidden.repeat(shape.folded, 1)
    mask = torch.zeros(hidden.shape, dtype=shape.dtype).masked_fill_(torch.from_numpy(hidden), -torch.inf)
    return mask.unsqueeze(1).to(shape.device)


def _pieces(rows: Sequence[Row], begin: int, shape: AttentionShape) -> tuple[Piece, ...]:
    pieces: list[Piece] = []
    for sequence, start, end in rows:
        num = end - start
        mask = None
        if start and num > 1:
            mask = torch.full((num, end), -torch.inf, dtype=shape.dtype, device=shape.device).triu_(start + 1)
        pieces.append(Piece(begin, begin + num, sequence.slot, end, num > 1 and not start, mask))
        begin += num
    return tuple(pieces)


class KVCache:
    """Keys and values of `num_slots` slots of `max_len` positions. Which slot belongs to whom is the scheduler's business."""

    def __init__(
        self, config: ModelConfig, num_slots: int, max_len: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        heads, size = config.num_kv_heads, config.head_dim
        self._groups = (heads, config.num_heads // heads, size)
        width = heads * size
        try:
            # Zeros, not empty: a masked position is multiplied by 0, and 0 · NaN would be NaN.
            table = torch.zeros(2, config.num_layers, num_slots * max_len, width, device=device, dtype=dtype)
        except RuntimeError as error:
            size_gb = 2 * config.num_layers * num_slots * max_len * width * dtype.itemsize / 1e9
            raise EngineError(
                f"a KV cache of {size_gb:.1f} GB does not fit: lower engine.num_slots or engine.max_len ({error})"
            ) from None
        self._keys = list(table[0])
        self._values = list(table[1])
        shape = (num_slots, max_len, heads, size)
        self._key_slots = [t.view(shape) for t in self._keys]
        self._value_slots = [t.view(shape) for t in self._values]

    def write(self, layer: int, rows: Tensor, keys: Tensor, values: Tensor) -> None:
        """Put `keys` and `values` [T, K·D] at `rows` (slot · max_len + position)."""
        self._keys[layer].index_copy_(0, rows, keys)
        self._values[layer].index_copy_(0, rows, values)

    def attend(self, layer: int, q_THD: Tensor, batch: PackedBatch) -> Tensor:
        """Attention of the batch's tokens over what their slots hold, themselves included: [T, H·D]."""
        keys, values = self._key_slots[layer], self._value_slots[layer]
        parts = [self._together(keys, values, q_THD, group) for group in batch.groups]
        parts += [_alone(keys, values, q_THD, piece) for piece in batch.pieces]
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    def _together(self, keys: Tensor, values: Tensor, q_THD: Tensor, group: RowGroup) -> Tensor:
        """Heads that share a KV head are folded into the query length, so nothing is repeated."""
        heads, folded, size = self._groups
        num, width = group.mask.shape[0], group.width
        q = q_THD[group.begin : group.end]
        if group.places is not None:
            grid = q.new_zeros(num * width, heads * folded, size)
            q = grid.index_copy_(0, group.places, q)
        q = q.reshape(num, width, heads, folded, size).transpose(1, 2).reshape(num, heads, width * folded, size)
        k, v = _of(keys, group).transpose(1, 2), _of(values, group).transpose(1, 2)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=group.mask)
        out = out.unflatten(2, (width, folded)).transpose(1, 2).reshape(num * width, heads * folded * size)
        return out if group.places is None else out.index_select(0, group.places)


def _of(table: Tensor, group: RowGroup) -> Tensor:
    if group.slots is None:
        return table[group.first : group.last, : group.length]
    return table[:, : group.length].index_select(0, group.slots)


def _alone(keys: Tensor, values: Tensor, q_THD: Tensor, piece: Piece) -> Tensor:
    begin, end, slot, length, causal, mask = piece
    q = q_THD.narrow(0, begin, end - begin).transpose(0, 1).unsqueeze(0)
    k = keys.narrow(0, slot, 1).narrow(1, 0, length).transpose(1, 2)
    v = values.narrow(0, slot, 1).narrow(1, 0, length).transpose(1, 2)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=True)
    return out.transpose(1, 2).reshape(end - begin, -1)
