"""Reads safetensors images, from a model folder or a weights blob, and checks them before anything is allocated."""

import math
import mmap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec

from actors.engines.engine import EngineError

MAX_HEADER_BYTES = 100_000_000
"""The limit the safetensors format itself sets."""

ITEM_BYTES: Mapping[str, int] = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
"""Element sizes of the types weights come in."""


class TensorPlace(NamedTuple):
    """Where one tensor lies: `begin` and `end` are byte offsets in the whole image."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


class _Tensor(msgspec.Struct):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def read_header(image: memoryview, source: str) -> dict[str, TensorPlace]:
    """Tensor name → Entry. Raises EngineError, naming `source`, when the image is malformed or truncated."""
    if len(image) < 8:
        raise EngineError(f"{source} is not a safetensors image: it has only {len(image)} bytes")
    size = int.from_bytes(image[:8], "little")
    if not 2 <= size <= min(MAX_HEADER_BYTES, len(image) - 8):
        raise EngineError(f"{source} is not a safetensors image: its header would have {size} bytes of {len(image)}")
    try:
        raw = msgspec.json.decode(image[8 : 8 + size], type=dict[str, msgspec.Raw])
        raw.pop("__metadata__", None)
        found = {name: msgspec.json.decode(value, type=_Tensor) for name, value in raw.items()}
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise EngineError(f"{source} is not a safetensors image: its header can't be read ({error})") from None
    return {name: _entry(name, tensor, 8 + size, len(image), source) for name, tensor in found.items()}


def _entry(name: str, tensor: _Tensor, base: int, total: int, source: str) -> TensorPlace:
    begin, end = tensor.data_offsets
    item = ITEM_BYTES.get(tensor.dtype)
    if item is None:
        raise EngineError(f"{source}: {name} has type {tensor.dtype}; weights are one of {', '.join(ITEM_BYTES)}")
    if not 0 <= begin <= end <= total - base or end - begin != item * math.prod(tensor.shape):
        raise EngineError(f"{source}: {name} {list(tensor.shape)} does not lie within the image; it may be truncated")
    return TensorPlace(tensor.dtype, tensor.shape, base + begin, base + end)


def folder_images(folder: Path) -> Iterator[tuple[str, memoryview]]:
    """Each *.safetensors file of a model folder, mapped read-only. Raises EngineError when there is none."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise EngineError(f"{folder} holds no *.safetensors file: check model.path, or prepare the base model first")
    for file in files:
        if not file.stat().st_size:
            raise EngineError(f"{file} is empty: write the model again")
        with file.open("rb") as opened:
            yield str(file), memoryview(mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ))
