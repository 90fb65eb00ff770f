"""Reads a model in Hugging Face's format: its config.json, and safetensors images from a folder or a weights blob. Needs neither torch nor transformers."""

import json
import math
import mmap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from actors.engines.engine import EngineError

FAMILIES = ("llama", "qwen2", "qwen3")


class Rope(NamedTuple):
    """Rotary embedding: `kind` is default, linear or llama3; the factors belong to the latter two."""

    theta: float
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_length: int = 8192


class ModelConfig(NamedTuple):
    """A decoder of the Llama or Qwen family. Sizes are in elements."""

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_eps: float
    rope: Rope
    tied: bool
    qk_norm: bool
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool


def read_config(folder: Path) -> ModelConfig:
    """Parse `folder`/config.json. Raises EngineError with one sentence when it is missing or the model is not supported."""
    path = folder / "config.json"
    try:
        raw = json.loads(path.read_text())
        return _parse(raw, path)
    except FileNotFoundError:
        raise EngineError(f"there is no {path}: check model.path, or prepare the base model first") from None
    except (OSError, ValueError, TypeError) as error:
        raise EngineError(f"{path} can't be read as a model config: {error}") from None
    except KeyError as error:
        raise EngineError(f"{path} lacks {error.args[0]!r}, which a decoder's config must have") from None


def _parse(raw: Mapping[str, Any], path: Path) -> ModelConfig:
    family = raw.get("model_type", "")
    if family not in FAMILIES:
        raise EngineError(
            f"{path}: model_type {family!r} is not one of {', '.join(FAMILIES)}; use engine.kind=vllm for it"
        )
    if raw.get("hidden_act", "silu") != "silu":
        raise EngineError(f"{path}: hidden_act {raw['hidden_act']!r} is not silu; use engine.kind=vllm for this model")
    if raw.get("use_sliding_window"):
        raise EngineError(f"{path}: sliding-window attention is not built in; use engine.kind=vllm for this model")
    heads = int(raw["num_attention_heads"])
    bias = bool(raw.get("attention_bias", False))
    return ModelConfig(
        family,
        vocab_size=int(raw["vocab_size"]),
        hidden_size=int(raw["hidden_size"]),
        intermediate_size=int(raw["intermediate_size"]),
        num_layers=int(raw["num_hidden_layers"]),
        num_heads=heads,
        num_kv_heads=int(raw.get("num_key_value_heads") or heads),
        head_dim=int(raw.get("head_dim") or int(raw["hidden_size"]) // heads),
        rms_eps=float(raw.get("rms_norm_eps", 1e-6)),
        rope=_rope(raw, path),
        tied=bool(raw.get("tie_word_embeddings", False)),
        qk_norm=family == "qwen3",
        qkv_bias=bias or family == "qwen2",
        out_bias=bias and family != "qwen2",
        mlp_bias=bool(raw.get("mlp_bias", False)),
    )


def _rope(raw: Mapping[str, Any], path: Path) -> Rope:
    """transformers 5 writes `rope_parameters`; older versions `rope_theta` and `rope_scaling`."""
    scaling: Mapping[str, Any] = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    theta = float(scaling.get("rope_theta") or raw.get("rope_theta") or 10000.0)
    if kind == "default":
        return Rope(theta)
    if kind == "linear":
        return Rope(theta, kind, float(scaling["factor"]))
    if kind != "llama3":
        raise EngineError(
            f"{path}: rope type {kind!r} is not one of default, linear, llama3; use engine.kind=vllm for it"
        )
    return Rope(
        theta,
        kind,
        float(scaling["factor"]),
        float(scaling["low_freq_factor"]),
        float(scaling["high_freq_factor"]),
        int(scaling["original_max_position_embeddings"]),
    )


# -- safetensors ------------------------------------------------------------------------------------------------------

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
