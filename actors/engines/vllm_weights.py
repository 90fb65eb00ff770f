"""Weights on their way into vLLM, which can't undo a swap: checked first, then handed to its processes by path, never in a pickle or on a wire."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self

from actors.engines.engine import EngineError
from actors.engines.hf_files import folder_images, read_header
from actors.engines.model import tensors_of

_MOST = 1 << 30
"""Bytes per write: Linux takes at most 2 GiB at once."""


class ExpectedTensors:
    """Names and shapes of a model's tensors."""

    def __init__(self, shapes: dict[str, tuple[int, ...]]) -> None:
        self.shapes = shapes
        self.names = sorted(shapes)

    @classmethod
    def of_folder(cls, folder: Path) -> Self:
        """Read the headers of a model folder. Raises EngineError when it holds no weights or damaged ones."""
        images = folder_images(folder)
        return cls(
            {name: entry.shape for source, image in images for name, entry in read_header(image, source).items()}
        )

    def check(self, image: memoryview, source: str) -> None:
        """Raises EngineError, naming `source`, when a tensor is missing, has another shape or isn't finite. Others are ignored."""
        import torch

        tensors = tensors_of(image, source)
        for name, shape in self.shapes.items():
            tensor = tensors.get(name)
            if tensor is None:
                raise EngineError(f"{source} lacks {name}: it belongs to another model, or is incomplete")
            if tuple(tensor.shape) != shape:
                raise EngineError(
                    f"{source}: {name} has shape {list(tensor.shape)}, but this model needs {list(shape)}"
                )
            if not torch.isfinite(tensor.sum(dtype=torch.float32)):
                raise EngineError(f"{source}: {name} is not finite: training diverged, or the image is damaged")


@contextmanager
def handed_over(image: memoryview) -> Iterator[str]:
    """A path that holds a copy of `image` while the block runs. Processes of the same user can open it; what they mapped stays.

    Raises OSError when there is no room for the copy.
    """
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("rubato-weights", os.MFD_CLOEXEC)
        path, temporary = f"/proc/{os.getpid()}/fd/{fd}", False
    else:
        fd, path = tempfile.mkstemp(prefix="rubato-weights-", suffix=".safetensors")
        temporary = True
    try:
        _write(fd, image)
        yield path
    finally:
        os.close(fd)
        if temporary:
            os.unlink(path)


def _write(fd: int, image: memoryview) -> None:
    rest = image.cast("B") if image.nbytes else memoryview(b"")
    while rest:
        rest = rest[os.write(fd, rest[:_MOST]) :]
