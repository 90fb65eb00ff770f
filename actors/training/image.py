"""Lays weights out as one safetensors image in memory that somebody else provides, without an image of its own between."""

import json
from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor

TYPES: Mapping[torch.dtype, str] = {torch.bfloat16: "BF16", torch.float32: "F32"}
"""Names of the types that a model computes in, as a safetensors header has them."""


class WeightsImage:
    """The place of each of a model's tensors, all of type `dtype`. Format: https://github.com/huggingface/safetensors#format.

    One image is written at a time: on a GPU its tensors pass through pinned memory that the next one uses again.
    """

    def __init__(self, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> None:
        self._dtype = dtype
        places: dict[str, object] = {}
        at = 0
        for name, tensor in tensors.items():
            begin, at = at, at + tensor.numel() * dtype.itemsize
            places[name] = {"dtype": TYPES[dtype], "shape": list(tensor.shape), "data_offsets": [begin, at]}
        header = json.dumps(places).encode()
        header += b" " * (-len(header) % 8)
        self._head = len(header).to_bytes(8, "little") + header
        self._pinned: Tensor | None = None
        self.size_bytes = len(self._head) + at

    def write(self, tensors: Mapping[str, Tensor], memory: memoryview) -> Callable[[], None]:
        """Write the present values, rounded to `dtype`, into `memory`, `size_bytes` long; they may change once this returns.

        The image is whole when what is returned was called, from any thread: on a GPU it waits for the copies, which are under way.
        """
        memory[: len(self._head)] = self._head
        body = torch.frombuffer(memory, dtype=self._dtype, offset=len(self._head))
        values = [tensor.detach() for tensor in tensors.values()]
        if not values[0].is_cuda:
            self._copy(values, body)
            return _nothing
        if self._pinned is None:
            self._pinned = torch.empty_like(body, pin_memory=True)
        self._copy(values, self._pinned)
        landed = torch.cuda.Event()
        # Later kernels of this stream, those of the next update among them, run after the copies.
        landed.record(torch.cuda.current_stream(values[0].device))
        return partial(_land, landed, self._pinned, body)

    def _copy(self, values: list[Tensor], to: Tensor) -> None:
        for value, place in zip(values, to.split([value.numel() for value in values]), strict=True):
            place.view(value.shape).copy_(value, non_blocking=True)


def _land(landed: torch.cuda.Event, pinned: Tensor, body: Tensor) -> None:
    landed.synchronize()
    body.copy_(pinned)


def _nothing() -> None:
    pass
