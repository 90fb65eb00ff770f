"""The way of new weights onto a GPU, beside the steps of an engine."""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

PIECE_BYTES = 16 << 20
"""Of each of two pinned buffers: one is filled while the other is on its way."""


class PinnedBuffers:
    """Two buffers that a GPU reads by itself. One thread at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers = [torch.empty(PIECE_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        self._read = [torch.cuda.Event() for _ in range(2)]
        """What was sent last out of each has left it."""

    def send(self, tensor: Tensor) -> Tensor:
        """A copy of `tensor`, contiguous in host memory, on the device, in the order of the current stream; `tensor` may change at once.

        A copy out of memory that is not pinned would hold the driver, and with it every step, until it is done.
        """
        there = torch.empty(tensor.nbytes, dtype=torch.uint8, device=self._device)
        here = tensor.reshape(-1).view(torch.uint8)
        for number, piece in enumerate(here.split(PIECE_BYTES) if len(here) else ()):
            buffer, read = self._buffers[number % 2][: len(piece)], self._read[number % 2]
            read.synchronize()
            buffer.copy_(piece)
            at = number * PIECE_BYTES
            there[at : at + len(piece)].copy_(buffer, non_blocking=True)
            read.record(torch.cuda.current_stream(self._device))
        return there.view(tensor.dtype).view(tensor.shape)


class Uploaded(Mapping[str, Tensor]):
    """Tensors of host memory, each sent anew when it is asked for: the device holds no second image."""

    def __init__(self, tensors: Mapping[str, Tensor], buffers: PinnedBuffers) -> None:
        self._tensors = tensors
        self._buffers = buffers

    def __getitem__(self, name: str) -> Tensor:
        return self._buffers.send(self._tensors[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)
