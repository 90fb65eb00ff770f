"""What the built-in engine takes of a model in Hugging Face's format: its config.json, and the tensors that follow from it. Needs no torch."""

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from rubato.actors.checkpoints import model_folder
from rubato.actors.checkpoints.model_folder import TensorPlace as TensorPlace
from rubato.actors.engines.engine import EngineError


class Rope(NamedTuple):
    """Rotary embedding: `kind` is default, linear or llama3; the factors belong to the latter two."""

    theta: float
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_length: int = 8192


class Experts(NamedTuple):
    """Every layer is a mixture of `num` experts of intermediate size `size`, of which a token takes `per_token`."""

    num: int
    per_token: int
    size: int
    normed: bool
    """The weights of the chosen ones add up to 1."""


class ModelConfig(NamedTuple):
    """A decoder of one of `FAMILIES`. Sizes are in elements."""

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
    max_positions: int
    window: int | None
    """Tokens that some layer attends over; None: all."""
    experts: Experts | None = None


class _Family(NamedTuple):
    """What transformers takes where config.json does not say."""

    max_positions: int
    kv_heads: int = 0
    """0: as many as heads."""
    head_dim: int = 0
    """0: the hidden size over the heads."""


FAMILIES: Mapping[str, _Family] = {
    "llama": _Family(2048),
    "mistral": _Family(131072, kv_heads=8),
    "qwen2": _Family(32768, kv_heads=32),
    "qwen3": _Family(32768, kv_heads=32, head_dim=128),
    "qwen3_moe": _Family(32768, kv_heads=4),
}

ROPES = ("default", "linear", "llama3")


def read_config(folder: Path) -> ModelConfig:
    """Parse `folder`/config.json. Raises EngineError with one sentence when it is missing or the model is not supported."""
    try:
        return _parse(_Described(folder / "config.json", model_folder.read_description(folder)))
    except ValueError as error:
        raise EngineError(str(error)) from None


class _Described(NamedTuple):
    """A config.json, whose values are of the type that they are read as. Raises ValueError, one sentence."""

    path: Path
    raw: Mapping[str, Any]

    def given(self, key: str, otherwise: Any = None) -> Any:
        value = self.raw.get(key)
        return otherwise if value is None else value

    def size(self, key: str, otherwise: int = 0) -> int:
        value = self.given(key, otherwise or None)
        if value is None:
            raise ValueError(f"{self.path} lacks {key!r}, which a decoder's config must have")
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{self.path}: {key} is {value!r}; it must be a whole number above 0")
        return value

    def number(self, key: str, otherwise: float | None = None) -> float:
        value = self.given(key, otherwise)
        if value is None:
            raise ValueError(f"{self.path} lacks {key!r}, which a model of its kind must have")
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
            raise ValueError(f"{self.path}: {key} is {value!r}; it must be a number above 0")
        return float(value)

    def flag(self, key: str) -> bool:
        value = self.given(key, otherwise=False)
        if not isinstance(value, bool):
            raise ValueError(f"{self.path}: {key} is {value!r}; it must be true or false")
        return value

    def refused(self, what: str) -> ValueError:
        return ValueError(f"{self.path}: {what}; use engine.kind=vllm for this model")


def _parse(described: _Described) -> ModelConfig:
    family, raw = described.given("model_type", ""), described.raw
    if "text_config" in raw:
        raise described.refused(f"model_type {family!r} is a language model within another (text_config), which is not built in")
    if not isinstance(family, str) or family not in FAMILIES:
        raise described.refused(f"model_type {family!r} is not one of {', '.join(FAMILIES)}, which the built-in engine takes")
    if (act := described.given("hidden_act", "silu")) not in ("silu", "swish"):
        raise described.refused(f"hidden_act {act!r} is not silu")
    heads, otherwise = described.size("num_attention_heads"), FAMILIES[family]
    hidden = described.size("hidden_size")
    bias = described.flag("attention_bias") and family in ("llama", "qwen3", "qwen3_moe")
    kv_heads = heads if "num_key_value_heads" in raw else otherwise.kv_heads or heads
    config = ModelConfig(
        family,
        vocab_size=described.size("vocab_size"),
        hidden_size=hidden,
        intermediate_size=described.size("intermediate_size"),
        num_layers=described.size("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=described.size("num_key_value_heads", kv_heads),
        head_dim=described.size("head_dim", otherwise.head_dim or hidden // heads),
        rms_eps=described.number("rms_norm_eps", 1e-6),
        rope=_rope(described),
        tied=described.flag("tie_word_embeddings"),
        qk_norm=family in ("qwen3", "qwen3_moe"),
        qkv_bias=bias or family == "qwen2",
        out_bias=bias,
        mlp_bias=described.flag("mlp_bias") and family == "llama",
        max_positions=model_folder.most_positions(raw, otherwise.max_positions),
        window=_window(described, family),
        experts=_experts(described) if family == "qwen3_moe" else None,
    )
    if config.head_dim % 2 or heads % config.num_kv_heads:
        raise ValueError(
            f"{described.path}: head_dim {config.head_dim} must be even, and num_attention_heads {heads} a multiple of "
            f"num_key_value_heads {config.num_kv_heads}"
        )
    return config


def _experts(described: _Described) -> Experts:
    """transformers 5 writes `num_local_experts`; older versions `num_experts`."""
    if described.given("mlp_only_layers", []) or described.given("decoder_sparse_step", 1) != 1:
        raise described.refused("some layers have no experts (mlp_only_layers, decoder_sparse_step), which is not built in")
    num = described.size("num_experts", described.size("num_local_experts", 128))
    found = Experts(
        num, described.size("num_experts_per_tok", 8), described.size("moe_intermediate_size", 768), described.flag("norm_topk_prob")
    )
    if found.per_token > num:
        raise ValueError(f"{described.path}: num_experts_per_tok {found.per_token} is more than the {num} experts")
    return found


def _window(described: _Described, family: str) -> int | None:
    """Of the layers that attend over a sliding window, as transformers decides which do."""
    kinds = described.given("layer_types", [])
    if not isinstance(kinds, list) or any(kind not in ("full_attention", "sliding_attention") for kind in kinds):
        raise described.refused(f"layer_types {kinds!r} are not full_attention alone")
    if family == "llama" or (family == "mistral" and "sliding_window" in described.raw and described.raw["sliding_window"] is None):
        return None
    window = described.size("sliding_window", 4096)
    if family == "mistral":
        return window
    slides = "sliding_attention" in kinds or family == "qwen3_moe"
    if not kinds and not slides:
        slides = described.size("num_hidden_layers") > described.given("max_window_layers", 28)
    return window if slides and described.flag("use_sliding_window") else None


def _rope(described: _Described) -> Rope:
    """transformers 5 writes `rope_parameters`; older versions `rope_theta` and `rope_scaling`."""
    scaling = described.given("rope_scaling") or described.given("rope_parameters") or {}
    if not isinstance(scaling, dict) or any(isinstance(value, dict) for value in scaling.values()):
        raise described.refused(f"rope parameters {scaling!r} differ from layer to layer")
    inner = _Described(described.path, {"rope_theta": described.given("rope_theta", 10000.0), **scaling})
    kind, theta = inner.given("rope_type", inner.given("type", "default")), inner.number("rope_theta")
    if inner.given("partial_rotary_factor", described.given("partial_rotary_factor", 1.0)) != 1.0:
        raise described.refused("partial_rotary_factor is not 1, and rotating a part of each head is not built in")
    if kind not in ROPES:
        raise described.refused(f"rope type {kind!r} is not one of {', '.join(ROPES)}")
    if kind == "default":
        return Rope(theta)
    if kind == "linear":
        return Rope(theta, kind, inner.number("factor"))
    low, high = inner.number("low_freq_factor"), inner.number("high_freq_factor")
    original = inner.size("original_max_position_embeddings", described.given("max_position_embeddings", 0))
    return Rope(theta, kind, inner.number("factor"), low, high, original)


# -- weights ------------------------------------------------------------------------------------------------------


def read_header(image: memoryview, source: str) -> dict[str, TensorPlace]:
    """Where each tensor of an image lies, by name. Raises EngineError, naming `source`, when the image is malformed or truncated."""
    try:
        return model_folder.read_header(image, source)
    except ValueError as error:
        raise EngineError(str(error)) from None


def folder_images(folder: Path) -> Iterator[tuple[str, memoryview]]:
    """Each file of a model folder that holds weights, mapped read-only. Raises EngineError when there is none."""
    try:
        for file in model_folder.weight_files(folder):
            yield str(file), model_folder.map_file(file)
    except ValueError as error:
        raise EngineError(str(error)) from None


# -- what fits --------------------------------------------------------------------------------------------------------


def check_length(config: ModelConfig, max_len: int, folder: Path) -> None:
    """Raises EngineError, one sentence, where sequences of `max_len` tokens are longer than the model, or the engine, takes."""
    check_positions(config.max_positions, max_len, folder)
    if config.window is not None and max_len > config.window:
        raise EngineError(
            f"{folder}: the model attends over a sliding_window of {config.window} tokens, which is not built in, and engine.max_len is "
            f"{max_len}: set engine.max_len to {config.window} or less, or engine.kind=vllm"
        )


def check_positions(most: int, max_len: int, folder: Path) -> None:
    """Raises EngineError, one sentence, where `max_len` is above the model's `most` positions; 0: not known."""
    if most and max_len > most:
        raise EngineError(
            f"{folder}: the model has {most} positions (max_position_embeddings in config.json), and engine.max_len is {max_len}: "
            f"set engine.max_len to {most} or less"
        )
