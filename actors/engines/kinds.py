"""What each kind of engine needs of its host, its model and its process, looked at before any process of the job is started."""

import importlib.util
import os
from pathlib import Path
from typing import Any

from actors.checkpoints.hf_files import check_fits, check_positions
from actors.checkpoints.model_folder import (
    check_device,
    check_model_folder,
    may_use_cuda,
    most_positions,
    read_description,
)
from actors.config import CUDA
from actors.engines.engine import ENGINES, VLLM_MISSING, EngineError
from runtime.errors import ConfigError
from runtime.importer import check_module


def check_host(config: Any) -> None:
    """The engine's package, the device, and a class of the user's."""
    kind = config.engine.kind
    if config.cluster.lease:
        check_module(config.cluster.lease, key="cluster.lease")
    if kind not in ENGINES:
        check_module(kind, key="engine.kind")
    elif kind == "vllm" and importlib.util.find_spec("vllm") is None:
        raise ConfigError(f"{VLLM_MISSING}.")
    elif kind == "vllm" and CUDA.match(config.model.device):
        raise ConfigError(
            f"model.device is {config.model.device}, but engine.kind=vllm takes the first GPUs that its process sees: "
            "give each engine its own with actors.engine.pools.NAME.gpus=1, see docs/pools.md."
        )
    elif kind != "scripted":
        check_device(config.model.device)


def preflight(config: Any, folder: Path) -> None:
    """An engine with a model needs its weights, and must compute it as the folder says. One of the user's own knows what it takes."""
    section, model = config.engine, folder / config.model.path
    if section.kind not in ("torch", "vllm"):
        return
    check_model_folder(model)
    try:
        if section.kind == "torch":
            check_fits(model, section.max_len)
        elif "hf_overrides" not in section.vllm and "VLLM_ALLOW_LONG_MAX_MODEL_LEN" not in os.environ:
            check_positions(most_positions(read_description(model)), section.max_len, model)
    except (EngineError, ValueError) as error:
        raise ConfigError(f"{error}.") from None


def preload(config: Any) -> tuple[str, ...] | None:
    """A user's engine and vLLM may start threads or CUDA as they are imported."""
    kind = config.engine.kind
    if kind == "scripted":
        return ()
    return None if kind != "torch" or may_use_cuda(config.model.device) else ("torch", ENGINES[kind].partition(":")[0])
