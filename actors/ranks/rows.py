"""Images of tensors that lie in shares over several ranks: each rank writes, and reads, its own rows, and none of them has a whole tensor.

A share is of whole rows, so it is contiguous in an image. Format: https://github.com/huggingface/safetensors#format.
"""

import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from rubato.actors.checkpoints.model_folder import ITEM_BYTES, TensorPlace
from rubato.actors.ranks.copies import write_at
from rubato.actors.training.forward import Copies

NAMES: Mapping[torch.dtype, str] = {
    torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16",
}  # fmt: skip
TYPES: Mapping[str, torch.dtype] = {name: dtype for dtype, name in NAMES.items()}

BITS: Mapping[str, str] = {"F64": "<i8", "F32": "<i4", "BF16": "<i2", "F16": "<i2"}
"""Integers as wide as each type: numpy has no bfloat16."""


class Share(NamedTuple):
    """What of a tensor lies here: `values`, from its element `first` on. Of several ranks with the same rows one `writes`."""

    values: Tensor
    first: int
    writes: bool


class Slab(NamedTuple):
    """Rows [begin, end) of a matrix in a tensor of many, which is shared out by whole matrices: one rank has all of them, or none."""

    fused: DTensor
    number: int
    begin: int
    end: int

    @property
    def shape(self) -> torch.Size:
        return torch.Size((self.end - self.begin, *self.fused.shape[2:]))

    @property
    def dtype(self) -> torch.dtype:
        return self.fused.dtype

    @property
    def itemsize(self) -> int:
        return self.fused.dtype.itemsize

    def numel(self) -> int:
        return self.shape.numel()

    def detach(self) -> "Slab":
        return self

    def share(self) -> "Share":
        """What of it lies here."""
        values, at, writes = _local(self.fused)
        here = at <= self.number < at + len(values)
        return Share(values[self.number - at, self.begin : self.end] if here else values.new_empty(0), 0, writes)


def cut_share(fused: Tensor, number: int, begin: int, end: int) -> Any:
    """A Slab of a tensor that is shared out, and a view of any other."""
    return Slab(fused, number, begin, end) if isinstance(fused, DTensor) else fused[number, begin:end]


def _local(tensor: DTensor) -> tuple[Tensor, int, bool]:
    """The rows that lie here, the first one's number, and whether this rank writes them."""
    mesh, values = tensor.device_mesh, cast("DTensor", tensor.detach()).to_local()
    _, offsets = compute_local_shape_and_global_offset(tensor.shape, mesh, tensor.placements)
    at = mesh.get_coordinate() or []
    writes = all(not where for where, placement in zip(at, tensor.placements, strict=True) if placement.is_replicate())
    return values, offsets[0] if values.numel() else 0, writes


def share_of(tensor: "Tensor | Slab", *, leads: bool) -> Share:
    """Of a tensor that is not shared out, all is everywhere, and the rank that `leads` writes it."""
    if isinstance(tensor, Slab):
        return tensor.share()
    if not isinstance(tensor, DTensor):
        return Share(tensor.detach(), 0, leads)
    values, row, writes = _local(tensor)
    return Share(values, row * math.prod(tensor.shape[1:]), writes)


class RowsImage:
    """One image of `tensors`, each of type `dtype`, or of its own where that is None. `leads`: of the rank that writes what is no rank's own."""

    def __init__(self, tensors: Mapping[str, Any], dtype: torch.dtype | None = None, *, leads: bool) -> None:
        self._leads = leads
        self._places: dict[str, tuple[int, torch.dtype]] = {}
        described: dict[str, object] = {"__metadata__": {"format": "pt"}} if dtype is None else {}
        at = 0
        for name, tensor in tensors.items():
            kind = dtype or tensor.dtype
            begin, at = at, at + tensor.numel() * kind.itemsize
            described[name] = {"dtype": NAMES[kind], "shape": list(tensor.shape), "data_offsets": [begin, at]}
            self._places[name] = begin, kind
        header = json.dumps(described).encode()
        header += b" " * (-len(header) % 8)
        self._head = len(header).to_bytes(8, "little") + header
        self.size_bytes = len(self._head) + at

    def write(self, tensors: Mapping[str, Any], memory: memoryview) -> None:
        """Write what lies here of the present values, rounded to the image's type, into `memory`, `size_bytes` long. Raises TrainError for a
        tensor that holds NaN or infinity here.
        """
        if self._leads:
            memory[: len(self._head)] = self._head
        copies = Copies()
        for name, at, values, kind in self._own(tensors):
            copies.add(name, values, torch.frombuffer(memory, dtype=kind, count=values.numel(), offset=at))
        copies.check()

    def pieces(self, tensors: Mapping[str, Any]) -> list[tuple[int, int]]:
        """Where each piece of what lies here begins in the image, and its bytes."""
        head = [(0, len(self._head))] if self._leads else []
        return head + [(at, values.numel() * kind.itemsize) for _, at, values, kind in self._own(tensors)]

    def pack(self, tensors: Mapping[str, Any], memory: memoryview) -> None:
        """Write these pieces one after another into `memory`, which begins at a multiple of 8 bytes. Raises as `write` does."""
        at, copies = 0, Copies()
        if self._leads:
            at = len(self._head)
            memory[:at] = self._head
        for name, _, values, kind in self._own(tensors):
            copies.add(name, values, torch.frombuffer(memory, dtype=kind, count=values.numel(), offset=at))
            at += values.numel() * kind.itemsize
        copies.check()

    def taken(self, tensors: Mapping[str, Any]) -> "TakenRows":
        """What lies here of the present values, to be written later."""
        parts = [(0, torch.tensor(list(self._head), dtype=torch.uint8))] if self._leads else []
        for _, at, values, kind in self._own(tensors):
            copy = torch.empty(values.shape, dtype=kind)
            parts.append((at, copy))
            copy.copy_(values)
        return TakenRows(parts, self.size_bytes)

    def _own(self, tensors: Mapping[str, Any]) -> Iterator[tuple[str, int, Tensor, torch.dtype]]:
        for name, tensor in tensors.items():
            share, (begin, kind) = share_of(tensor, leads=self._leads), self._places[name]
            if share.writes and share.values.numel():
                yield name, len(self._head) + begin + share.first * kind.itemsize, share.values, kind


class TakenRows(NamedTuple):
    """Copies of one rank's rows, each with its place in the image."""

    parts: list[tuple[int, Tensor]]
    size_bytes: int
    """Of the whole image."""

    def pieces(self) -> list[tuple[int, memoryview]]:
        """Where each piece belongs, and its bytes."""
        return [(at, values.contiguous().view(-1).view(torch.uint8).numpy().data) for at, values in self.parts]

    def write(self, path: Path) -> None:
        """Write them into `path`, on disk when this returns. Blocks; raises OSError."""
        handle = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
        try:
            for at, values in self.pieces():
                write_at(handle, values, at)
            if os.fstat(handle).st_size < self.size_bytes:
                os.ftruncate(handle, self.size_bytes)
            os.fsync(handle)
        finally:
            os.close(handle)


def read_share(image: memoryview, place: TensorPlace, into: Any, *, leads: bool) -> None:
    """Set what lies here of `into` from the tensor at `place` of an image."""
    share = share_of(into, leads=leads)
    if num := share.values.numel():
        begin = place.begin + share.first * ITEM_BYTES[place.dtype]
        bits = torch.tensor(np.frombuffer(image, BITS[place.dtype], count=num, offset=begin))
        with torch.no_grad():
            share.values.copy_(bits.view(TYPES[place.dtype]).view(share.values.shape))
