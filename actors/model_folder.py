"""Whether this host has what `model` in the config asks for: a folder in HF format, as far as its file names tell, and a device."""

import math
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from actors.config import CUDA
from planning.language_model import ModelSpec
from runtime.errors import ConfigError

NEEDED = ("config.json", "*.safetensors", "tokenizer.json")


def check_model_folder(folder: Path, *, key: str = "model.path") -> None:
    """Raises ConfigError, one sentence, for a folder that is missing or lacks a part; `key` of the config names it."""
    if not os.path.isdir(folder):  # unlike Path.is_dir, it takes a name too long for an answer
        raise ConfigError(f"model folder {folder} does not exist. Set {key} to a folder in HF format.")
    missing = [pattern for pattern in NEEDED if not any(folder.glob(pattern))]
    if missing:
        what = " and no ".join(missing)
        raise ConfigError(f"model folder {folder} has no {what}. Set {key} to a folder in HF format.")


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
