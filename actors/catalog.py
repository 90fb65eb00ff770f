"""Hardware classes and models by name: the files of configs/hardware and configs/models."""

from pathlib import Path
from typing import Any, TypeVar

import msgspec
from pydantic import ValidationError

from rubato.actors.config import one_of
from rubato.planning.hardware import GpuSpec, Spec
from rubato.planning.language_model import ModelSpec
from rubato.planning.roofline import Deployment
from rubato.runtime.config.overrides import read

SpecT = TypeVar("SpecT", bound=Spec)

FOLDER = Path(__file__).resolve().parents[1] / "configs"


def hardware(name: str) -> GpuSpec:
    """The class `name`, such as h20. Raises ValueError, a sentence with the nearest name, where there is none."""
    return _named(GpuSpec, "hardware", name)


def model(name: str) -> ModelSpec:
    """The shape of model `name`, such as qwen3-8b. Raises ValueError, a sentence with the nearest name, where there is none."""
    return _named(ModelSpec, "models", name)


def deployed(hardware_name: str, model_name: str, degree: int) -> Deployment:
    """An engine with that model on `degree` GPUs of the class. Raises ValueError, a sentence, where it can't be."""
    gpu, shape = hardware(hardware_name), model(model_name)
    fitting = [n for n in range(1, gpu.gpus_per_server + 1) if shape.heads % n == 0]
    if degree not in fitting:
        raise ValueError(
            f"degree={degree} does not divide the {shape.heads} attention heads of {model_name}, or is more than one "
            f"server's {gpu.gpus_per_server} {gpu.name}. Take one of {', '.join(map(str, fitting))}"
        )
    try:
        return Deployment(gpu=gpu, model=shape, tp=degree)
    except ValidationError as error:
        raise ValueError(f"{model_name} does not fit {degree} x {gpu.name}. Take a larger degree, or a smaller model") from error


def shape_of(folder: Path) -> ModelSpec:
    """The shape of the model in `folder`, as planners count with it. Raises ValueError, one sentence, where its config.json has none. Blocks."""
    try:
        found = msgspec.json.decode((folder / "config.json").read_bytes(), type=dict[str, Any])
        raw: dict[str, Any] = found.get("text_config", found)
        heads, hidden = int(raw["num_attention_heads"]), int(raw["hidden_size"])
        experts = int(raw.get("num_experts") or raw.get("num_local_experts") or 0)
        return ModelSpec(
            name=folder.name,
            layers=raw["num_hidden_layers"],
            hidden=hidden,
            heads=heads,
            kv_heads=raw.get("num_key_value_heads") or heads,
            head_dim=raw.get("head_dim") or hidden // heads,
            qkv_bias=raw.get("model_type") in ("qwen2", "qwen2_moe"),
            qk_norm=raw.get("model_type") in ("qwen3", "qwen3_moe"),
            ffn=0 if experts else raw["intermediate_size"],
            experts=experts,
            experts_per_token=raw.get("num_experts_per_tok") or 0,
            expert_ffn=(raw.get("moe_intermediate_size") or raw["intermediate_size"]) if experts else 0,
            shared_ffn=raw.get("shared_expert_intermediate_size") or 0,
            vocab=raw["vocab_size"],
            tied_embeddings=raw.get("tie_word_embeddings", False),
        )
    except (OSError, msgspec.MsgspecError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{folder / 'config.json'} does not say the model's shape, with which the orchestrator counts ({type(error).__name__}: "
            f"{str(error).splitlines()[0]}): set model.path to a folder in Hugging Face's format"
        ) from None


def _named(kind: type[SpecT], folder: str, name: str) -> SpecT:
    names = sorted(path.stem for path in (FOLDER / folder).glob("*.yaml") if not path.stem.startswith("prices"))
    return kind.model_validate(read(FOLDER / folder / f"{one_of(name.lower(), names)}.yaml").tree)
