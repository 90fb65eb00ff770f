"""Whether this host has what `model` in the config asks for: a folder in Hugging Face's format, read without its weights, and a device."""

import math
import mmap
import os
import random
import subprocess
import sys
from bisect import bisect_right
from collections.abc import Mapping
from functools import cache
from hashlib import blake2b
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from actors.config import CUDA
from runtime.errors import ConfigError

NEEDED = ("config.json", "*.safetensors", "tokenizer.json")


def check_model_folder(folder: Path, *, key: str = "model.path") -> None:
    """Raises ConfigError, one sentence, for a folder that holds no whole model, or one whose parts contradict each other; `key` of the
    config names it. Blocks, reads headers alone, and a head only where the folder has two."""
    if not os.path.isdir(folder):  # unlike Path.is_dir, it takes a name too long for an answer
        raise ConfigError(f"model folder {folder} does not exist. Set {key} to a folder in HF format.")
    if (folder / "adapter_config.json").exists():
        raise ConfigError(
            f"model folder {folder} holds an adapter (adapter_config.json), which is not built in: merge it into its base model, "
            f"and set {key} to a folder with the whole."
        )
    missing = [pattern for pattern in NEEDED if not any(folder.glob(pattern))]
    if missing:
        what = " and no ".join(missing)
        others = (path for path in sorted(folder.iterdir()) if path.suffix in (".bin", ".pt", ".pth", ".gguf"))
        for other in [*others][:1] if "*.safetensors" in missing else ():
            how = ", gguf_file" if other.suffix == ".gguf" else ""
            what += f" ({other.name} is not read: load it with transformers{how}, and save_pretrained writes the other form)"
        raise ConfigError(f"model folder {folder} has no {what}. Set {key} to a folder in HF format.")
    try:
        raw, tensors = read_description(folder), read_tensors(folder)
    except ValueError as error:
        raise ConfigError(f"{error}.") from None
    if any(parts.get("quantization_config") for parts in (raw, text_part(raw))):
        raise ConfigError(
            f"model folder {folder} holds quantised weights (quantization_config in config.json), which can't be trained: "
            f"set {key} to the folder that they were made from."
        )
    _check_head(folder, raw, tensors)
    _check_tokens(folder, raw, tensors)


EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"

UNTIED = ("llama", "mistral", "qwen2", "qwen3")
"""Families whose models have a head of their own where config.json does not say."""


def _check_head(folder: Path, raw: Mapping[str, Any], tensors: "Mapping[str, StoredTensor]") -> None:
    """Only of models that name their parts as Llama does."""
    tied = raw.get("tie_word_embeddings", False if raw.get("model_type") in UNTIED else None)
    if EMBED not in tensors or tied is None:
        return
    says = f"model folder {folder}: config.json says tie_word_embeddings={'true' if tied else 'false'}"
    if not tied and HEAD not in tensors:
        by_default = "" if "tie_word_embeddings" in raw else " by saying nothing of it"
        raise ConfigError(
            f"{says}{by_default}, but there is no {HEAD}, so the output head would be made up: set it to true if the head is the "
            "embedding, or save the model again."
        )
    if tied and HEAD in tensors and not _same_values(tensors[HEAD], tensors[EMBED]):
        raise ConfigError(
            f"{says}, but {HEAD} differs from {EMBED}, and one of the two would be ignored: set it to false, or leave {HEAD} out."
        )


def _same_values(one: "StoredTensor", other: "StoredTensor") -> bool:
    if (one.place.dtype, one.place.shape) != (other.place.dtype, other.place.shape):
        return False
    with one.file.open("rb") as left, other.file.open("rb") as right:
        left.seek(one.place.begin)
        right.seek(other.place.begin)
        rest = one.place.end - one.place.begin
        while rest > 0:
            if (read := left.read(min(rest, 1 << 20))) != right.read(len(read)) or not read:
                return False
            rest -= len(read)
    return True


class _AddedToken(msgspec.Struct):
    id: int


class _Vocabulary(msgspec.Struct):
    vocab: dict[str, int] | list[Any] = {}


class _Tokenizer(msgspec.Struct):
    model: _Vocabulary
    added_tokens: list[_AddedToken] = []


def _check_tokens(folder: Path, raw: Mapping[str, Any], tensors: "Mapping[str, StoredTensor]") -> None:
    """A token beyond the embedding would fail in the middle of a run. What is no tokenizer.json is told by who reads it."""
    path = folder / "tokenizer.json"
    try:
        if path.stat().st_size > LARGEST_BESIDE:
            return
        found = msgspec.json.decode(path.read_bytes(), type=_Tokenizer)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return
    vocab = found.model.vocab
    ids = list(vocab.values()) if isinstance(vocab, dict) else [len(vocab) - 1]
    last = max([*ids, *(token.id for token in found.added_tokens)], default=-1)
    rows = tensors[EMBED].place.shape[0] if EMBED in tensors else text_part(raw).get("vocab_size")
    if isinstance(rows, int) and last >= rows:
        raise ConfigError(
            f"model folder {folder}: tokenizer.json has tokens up to id {last}, but the model's embedding has {rows} rows: take the "
            "tokenizer that belongs to it, or resize the embedding and save the model again."
        )


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
        raise ValueError(
            f"{source} is a pointer of Git LFS and no weights: fetch the file itself, as `git lfs pull` does"
        )
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
    """Where a version's sampled digest looks: the same for whoever knows the run's seed and the image's header, and elsewhere in every version."""
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
    item, width = ITEM_BYTES[place.dtype], rows_of(place.shape)[1]
    starts = (place.begin + item * (row * width + cut.left) for row in range(cut.top, cut.bottom))
    return b"".join(image[start : start + item * (cut.right - cut.left)] for start in starts)


def slice_digest(values: Any) -> bytes:
    """Of a slice's elements, as bytes of the type that they are compared in."""
    return blake2b(values, digest_size=DIGEST_BYTES).digest()


WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


class _Index(msgspec.Struct):
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
        named = sorted(set(msgspec.json.decode(index.read_bytes(), type=_Index).weight_map.values()))
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


DESCRIBED = (
    "model_type",
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
)
"""Of config.json: what two folders of one model have in common, whatever wrote them."""


def same_model(one: Path, other: Path) -> bool:
    """Whether two folders hold the same kind of model with the same tokenizer; True where one of them does not say. Blocks."""
    try:
        configs = [
            msgspec.json.decode((folder / "config.json").read_bytes(), type=dict[str, Any]) for folder in (one, other)
        ]
        tokens = [(folder / "tokenizer.json").read_bytes() for folder in (one, other)]
    except (OSError, msgspec.MsgspecError):
        return True
    described = [[config.get(key) for key in DESCRIBED] for config in configs]
    return described[0] == described[1] and tokens[0] == tokens[1]


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


def check_device(device: str) -> None:
    """Raises ConfigError where `model.device` is a GPU that torch does not see."""
    if device.startswith("cuda"):
        pick_device(device, num_gpus())


def pick_device(device: str, num: int) -> str:
    """What torch calls `model.device` where it sees `num` GPUs. Raises ConfigError where it is not there, one sentence."""
    if device.startswith("cuda") and not num:
        raise ConfigError(
            f"model.device is {device}, but torch sees no CUDA device: set model.device=cpu, or install a CUDA build."
        )
    if (found := CUDA.match(device)) and int(found[1]) >= num:
        seen = "cuda:0" if num == 1 else f"cuda:0 to cuda:{num - 1}"
        raise ConfigError(
            f"model.device is {device}, but torch sees {seen} alone: set one of these, or see CUDA_VISIBLE_DEVICES."
        )
    return device if device != "auto" else "cuda" if num else "cpu"


@cache
def num_gpus() -> int:
    """Asks torch in a process of its own: it is too heavy for a launcher."""
    look = "import torch; print(torch.cuda.device_count() if torch.cuda.is_available() else 0)"
    told = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, check=False).stdout.split()
    return int(told[-1]) if told else 0


GPUS = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")
"""NVIDIA's, AMD's, and either under WSL."""


def may_use_cuda(device: str) -> bool:
    """Whether a process under `model.device` may: with auto it does where torch can, which takes seconds to ask."""
    return device.startswith("cuda") or (device == "auto" and any(map(os.path.exists, GPUS)))
