"""The KV cache: one fixed run of positions per slot, laid out so that writing is one row copy and reading is a view."""

import torch
import torch.nn.functional as F
from torch import Tensor

from actors.engines.batch import PackedBatch, Piece, RowGroup
from actors.engines.engine import EngineError
from actors.engines.model_config import ModelConfig


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
        self._keys, self._values = list(table[0]), list(table[1])
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
