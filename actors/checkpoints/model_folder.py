"""A model folder in Hugging Face's format, read without its weights, and the device that `model` in the config asks for."""

import math
import mmap
import random
from bisect import bisect_right
from collections.abc import Mapping
from hashlib import blake2b
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from rubato.actors.config import CUDA
from rubato.runtime.errors import ConfigError

ADAPTER_CONFIG = "adapter_config.json"
"""In a folder that holds an adapter, as peft writes it."""

EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def read_description(folder: Path) -> dict[str, Any]:
    """The config.json of a model folder. Raises ValueError, one sentence. Blocks."""
    path = folder / "config.json"
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except FileNotFoundError:
        raise ValueError(f"there is no {path}: check model.path, or prepare the base model first") from None
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} can't be read as a model config: {error}") from None


def text_part(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """What config.json says of the language model, which in one that sees or hears too stands apart."""
    inner = raw.get("text_config")
    return inner if isinstance(inner, dict) else raw


def most_positions(raw: Mapping[str, Any], otherwise: int = 0) -> int:
    """Tokens that a sequence may have, by config.json; `otherwise` where it does not say. Raises ValueError where it says nonsense."""
    raw = text_part(raw)
    told = raw.get("max_position_embeddings") or raw.get("n_positions") or otherwise
    scaling = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    try:
        kind, factor = scaling.get("rope_type", scaling.get("type", "default")), float(scaling.get("factor") or 1.0)
        if kind == "yarn":
            told = scaling.get("original_max_position_embeddings") or told
        return int(told * factor) if kind in ("linear", "dynamic", "yarn") else int(told)
    except (AttributeError, TypeError, ValueError, OverflowError):
        raise ValueError(f"max_position_embeddings={told!r} with rope {scaling!r} is no number of positions") from None


# -- safetensors --------------------------------------------------------------------------------------------------

MAX_HEADER_BYTES = 100_000_000
"""The limit the safetensors format itself sets."""

LFS = b"version https://git-lfs"

ITEM_BYTES: Mapping[str, int] = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
"""Element sizes of the types weights come in."""


class TensorPlace(NamedTuple):
    """Where one tensor lies: `begin` and `end` are byte offsets in the whole image."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


class StoredTensor(NamedTuple):
    """Which file of a model folder has it, and where."""

    file: Path
    place: TensorPlace


class _Tensor(msgspec.Struct):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def read_header(image: memoryview, source: str) -> dict[str, TensorPlace]:
    """Where each tensor of an image lies, by name. Raises ValueError, naming `source`, when the image is malformed or truncated."""
    if len(image) < 8:
        raise ValueError(f"{source} is not a safetensors image: it has only {len(image)} bytes")
    if image[: len(LFS)] == LFS:
        raise ValueError(f"{source} is a pointer of Git LFS and no weights: fetch the file itself, as `git lfs pull` does")
    size = int.from_bytes(image[:8], "little")
    if not 2 <= size <= min(MAX_HEADER_BYTES, len(image) - 8):
        raise ValueError(f"{source} is not a safetensors image: its header would have {size} bytes of {len(image)}")
    try:
        raw = msgspec.json.decode(image[8 : 8 + size], type=dict[str, msgspec.Raw])
        raw.pop("__metadata__", None)
        found = {name: msgspec.json.decode(value, type=_Tensor) for name, value in raw.items()}
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{source} is not a safetensors image: its header can't be read ({error})") from None
    return {name: _place(name, tensor, 8 + size, len(image), source) for name, tensor in found.items()}


def _place(name: str, tensor: _Tensor, base: int, total: int, source: str) -> TensorPlace:
    begin, end = tensor.data_offsets
    item = ITEM_BYTES.get(tensor.dtype)
    if item is None:
        raise ValueError(f"{source}: {name} has type {tensor.dtype}; weights are one of {', '.join(ITEM_BYTES)}")
    if not 0 <= begin <= end <= total - base or end - begin != item * math.prod(tensor.shape):
        raise ValueError(f"{source}: {name} {list(tensor.shape)} does not lie within the image; it may be truncated")
    return TensorPlace(tensor.dtype, tensor.shape, base + begin, base + end)


NUM_SLICES, SLICE_BYTES, SLICE_ROWS, DIGEST_BYTES = 64, 4096, 32, 8


class Slice(NamedTuple):
    """A block of a tensor as an image has it, row by row; a vector is one row. Being as high as wide, it lies close together in a transposed
    tensor too."""

    name: str
    top: int
    bottom: int
    left: int
    right: int


def rows_of(shape: tuple[int, ...]) -> tuple[int, int]:
    """How many rows a tensor has in an image, and how long each is."""
    width = shape[-1] if shape else 1
    return (math.prod(shape) // width if width else 0), width


def sampled_slices(header: Mapping[str, TensorPlace], seed: int, version: int) -> list[Slice]:
    """Slices that a version's sampled digest covers: they follow from the run's seed and the image's header; each version has others."""
    order = sorted(header.items(), key=lambda item: item[1].begin)
    ends = list(accumulate(math.prod(place.shape) for _, place in order))
    chance = random.Random(f"{seed}/weights/{version}")
    found: list[Slice] = []
    for _ in range(NUM_SLICES if ends and ends[-1] else 0):
        at = chance.randrange(ends[-1])
        index = bisect_right(ends, at)
        name, place = order[index]
        num, width = rows_of(place.shape)
        top, left = divmod(at - (ends[index - 1] if index else 0), width)
        height = min(SLICE_ROWS, num)
        length = min(SLICE_BYTES // ITEM_BYTES[place.dtype] // height, width)
        top, left = min(top, num - height), min(left, width - length)
        found.append(Slice(name, top, top + height, left, left + length))
    return found


def slice_of(image: memoryview, place: TensorPlace, cut: Slice) -> bytes:
    """A slice's elements, as the image has them."""
    return b"".join(image[begin:end] for begin, end in rows_of_slice(place, cut))


def rows_of_slice(place: TensorPlace, cut: Slice) -> list[tuple[int, int]]:
    """Where a slice's rows begin and end in the image."""
    item, width = ITEM_BYTES[place.dtype], rows_of(place.shape)[1]
    starts = (place.begin + item * (row * width + cut.left) for row in range(cut.top, cut.bottom))
    return [(start, start + item * (cut.right - cut.left)) for start in starts]


def slice_digest(values: Any) -> bytes:
    """Of a slice's elements, as bytes of the type that they are compared in."""
    return blake2b(values, digest_size=DIGEST_BYTES).digest()


WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


class Index(msgspec.Struct):
    weight_map: dict[str, str]


def weight_files(folder: Path) -> list[Path]:
    """The files that hold a folder's weights, as transformers picks them. Raises ValueError, one sentence. Blocks."""
    if (folder / WEIGHTS).exists():
        return [folder / WEIGHTS]
    index = folder / INDEX
    if not index.exists():
        there = sorted(path.name for path in folder.glob("*.safetensors"))
        but = f", only {there[0]}" if there else ""
        raise ValueError(
            f"{folder} holds no *.safetensors file of the name {WEIGHTS}, nor {INDEX}{but}: check model.path, or prepare the base "
            "model first"
        )
    try:
        named = sorted(set(msgspec.json.decode(index.read_bytes(), type=Index).weight_map.values()))
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ValueError(f"{index} can't be read: {error}") from None
    if gone := [name for name in named if not (folder / name).is_file()]:
        raise ValueError(f"{folder} has no {gone[0]}, which {INDEX} names: fetch the model again")
    return [folder / name for name in named]


def map_file(path: Path) -> memoryview:
    """Mapped read-only. Raises ValueError for an empty file. Blocks."""
    if not path.stat().st_size:
        raise ValueError(f"{path} is empty: write the model again")
    with path.open("rb") as opened:
        return memoryview(mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ))


def read_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Where each tensor of a model folder lies, by name. Raises ValueError, one sentence. Blocks, reads headers alone."""
    found: dict[str, StoredTensor] = {}
    for file in weight_files(folder):
        header = read_header(map_file(file), str(file))
        found |= {name: StoredTensor(file, place) for name, place in header.items()}
    return found


WEIGHT_SUFFIXES = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".ckpt", ".onnx"}
LARGEST_BESIDE = 64 * 1024 * 1024
"""Twice the largest tokenizer.json: a larger file of whatever name holds weights."""


def files_beside_weights(folder: Path) -> dict[str, bytes]:
    """Everything in a model folder that makes weights a model, by path within it: configs, tokenizer, chat templates, code, licence. Blocks.

    A folder in it belongs to the model unless it holds weights, which are of the base model in another form, or more than `LARGEST_BESIDE`.
    """
    found: dict[str, bytes] = {}
    for path in sorted(folder.iterdir()):
        if path.name.startswith("."):
            continue
        if path.is_dir():
            inner = [each for each in sorted(path.rglob("*")) if each.is_file()]
            if not any(map(_is_weights, inner)) and sum(each.stat().st_size for each in inner) <= LARGEST_BESIDE:
                found |= {str(each.relative_to(folder)): each.read_bytes() for each in inner}
        elif path.is_file() and not _is_weights(path):
            found[path.name] = path.read_bytes()
    return found


def _is_weights(path: Path) -> bool:
    """The index of weights in several files too."""
    named = path.suffix in WEIGHT_SUFFIXES or path.name.endswith(".index.json")
    return named or path.stat().st_size > LARGEST_BESIDE


def vocab_size_of(folder: Path) -> int | None:
    """Number of token ids of the model in `folder`; None where it does not say. Blocks."""
    try:
        config = msgspec.json.decode((folder / "config.json").read_bytes())
    except (OSError, msgspec.MsgspecError):
        return None
    size = config.get("vocab_size") if isinstance(config, dict) else None
    return size if isinstance(size, int) else None


def num_parameters(folder: Path) -> int:
    """Of the model in `folder`, as the headers of its *.safetensors say; 0 where they don't. Blocks, reads no weights."""
    count = 0
    try:
        for path in folder.glob("*.safetensors"):
            with path.open("rb") as file:
                header = msgspec.json.decode(file.read(int.from_bytes(file.read(8), "little")), type=dict[str, Any])
            count += sum(math.prod(tensor["shape"]) for name, tensor in header.items() if name != "__metadata__")
    except (OSError, msgspec.MsgspecError, KeyError, TypeError, OverflowError, MemoryError):
        return 0
    return count


def pick_device(device: str, num: int) -> str:
    """What torch calls `model.device` where it sees `num` GPUs. Raises ConfigError where it is not there, one sentence."""
    if device.startswith("cuda") and not num:
        raise ConfigError(f"model.device is {device}, but torch sees no CUDA device: set model.device=cpu, or install a CUDA build.")
    if (found := CUDA.match(device)) and int(found[1]) >= num:
        seen = "cuda:0" if num == 1 else f"cuda:0 to cuda:{num - 1}"
        raise ConfigError(f"model.device is {device}, but torch sees {seen} alone: set one of these, or see CUDA_VISIBLE_DEVICES.")
    return device if device != "auto" else "cuda" if num else "cpu"
