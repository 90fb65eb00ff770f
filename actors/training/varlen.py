"""Attention over the sequences of a row by torch's kernel for sequences of any lengths, which is of GPUs and half precision."""

import inspect
from functools import cache
from typing import Any

from torch import Tensor

from rubato.actors.training.forward import Row

LARGEST_HEAD = 256
"""Of the kernel, whose heads also have a multiple of 8 elements."""


def attend(query: Tensor, key: Tensor, value: Tensor, row: Row, scale: float | None, window: int | None) -> Tensor | None:
    """[L, H, D], from [H, L, D] each, with fewer heads of keys and values. None where torch has no such kernel, or it takes no such heads."""
    kernel, size = _kernel(), query.shape[-1]
    if kernel is None or not size == value.shape[-1] <= LARGEST_HEAD or size % 8:
        return None
    fewer = query.shape[0] // key.shape[0]
    shared: dict[str, Any] = {}
    if fewer > 1 and "enable_gqa" in inspect.signature(kernel).parameters:
        shared = {"enable_gqa": True}
    elif fewer > 1:
        key, value = key.repeat_interleave(fewer, 0), value.repeat_interleave(fewer, 0)
    query, key, value = (each.transpose(0, 1).contiguous() for each in (query, key, value))
    width = -1 if window is None else window - 1
    return kernel(query, key, value, row.ends, row.ends, row.longest, row.longest, scale=scale, window_size=(width, 0), **shared)


@cache
def _kernel() -> Any:
    """None in a torch that has none, or one without scale and window."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    return varlen_attn if {"scale", "window_size"} <= {*inspect.signature(varlen_attn).parameters} else None
