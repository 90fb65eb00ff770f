"""What each kind of engine needs of its job, host, model and process, looked at before any process of the job is started."""

import importlib.util
import os
from collections import Counter
from pathlib import Path
from typing import Any

from rubato.actors import plugins
from rubato.actors.checkpoints import model_folder
from rubato.actors.checkpoints.devices import check_device, may_use_cuda
from rubato.actors.checkpoints.hf_files import ModelConfig, check_length, check_positions, read_config
from rubato.actors.checkpoints.model_folder import HEAD, most_positions, read_description, read_tensors
from rubato.actors.config import CUDA, engine_specs
from rubato.actors.engines.engine import ENGINES, VLLM_MISSING, EngineError
from rubato.runtime.config import Config as Job
from rubato.runtime.errors import ConfigError
from rubato.runtime.importer import check_module

COMPUTED = ".rotary_emb.inv_freq"
"""Old folders store it; it follows from config.json."""

VLLM_HOTTEST = 2.0
"""Temperature above which vLLM refuses a request."""


def check(job: Job) -> None:
    """Raises ValueError for what the job's engines can't do."""
    _check_sampling(job)
    _check_servers(job)


def _check_servers(job: Job) -> None:
    """A config is also looked at as each pool has it: pools that say nothing have one server, whichever that is."""
    kind, url = job.section("engine").kind, job.section("engine").url
    owners = Counter[str]()
    for spec in engine_specs(job).values():
        for pool in spec.members:
            own = spec.pools[pool].set if pool else {}
            if own.get("engine.kind", kind) == "vllm_server":
                owners[str(own.get("engine.url", ""))] += 1
    if owners and job.section("train").lora is not None:
        raise ValueError(
            "engine.kind=vllm_server takes no adapter, and train.lora trains one: set engine.kind=vllm or torch, or leave train.lora out"
        )
    if shared := [told for told, num in owners.items() if num > 1]:
        raise ValueError(
            f"{owners[shared[0]]} engines have the server {shared[0] or url}, and each brings it weights of its own: set actors.engine.count=1, or "
            "give each pool a server of its own with actors.engine.pools.NAME.set.engine.url"
        )


def _check_sampling(job: Job) -> None:
    kind = job.section("engine").kind
    for section in ("rollout", "eval"):
        if kind in ("vllm", "vllm_server") and job.has(section) and (given := job.section(section).temperature) > VLLM_HOTTEST:
            raise ValueError(
                f"{section}.temperature is {given:g}, but engine.kind={kind} takes {VLLM_HOTTEST:g} at most: lower it, or set engine.kind=torch"
            )
    if job.has("eval") and kind == "scripted":
        held_out = job.section("eval")
        if held_out.samples > 1 and held_out.top_p < 1.0:
            raise ValueError(
                f"eval.top_p is {held_out.top_p:g}, but engine.kind=scripted has no top-p: set eval.top_p=1, or engine.kind=torch"
            )


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
    elif kind == "vllm_server":
        try:
            plugins.load(plugins.SERVER_KEY)(config.engine.api_key_env)
        except EngineError as error:
            raise ConfigError(f"{error}.") from None
    elif kind != "scripted":
        check_device(config.model.device)


def preflight(config: Any, folder: Path) -> None:
    """An engine with a model needs its weights, and must compute it as the folder says. One of the user's own knows what it takes."""
    section, model = config.engine, folder / config.model.path
    if section.kind not in ("torch", "vllm", "vllm_server"):
        return
    plugins.load(plugins.MODEL_CHECK)(model)
    try:
        if section.kind == "torch":
            check_fits(model, section.max_len)
        elif "hf_overrides" not in section.vllm and "VLLM_ALLOW_LONG_MAX_MODEL_LEN" not in os.environ:
            check_positions(most_positions(read_description(model)), section.max_len, model)
    except (EngineError, ValueError) as error:
        raise ConfigError(f"{error}.") from None


def check_fits(folder: Path, max_len: int) -> None:
    """Raises EngineError, one sentence, for a model that the built-in engine would not compute as its folder describes it, in sequences of up
    to `max_len` tokens. Blocks, reads headers alone."""
    config = read_config(folder)
    check_length(config, max_len, folder)
    try:
        tensors = read_tensors(folder)
    except ValueError as error:
        raise EngineError(str(error)) from None
    wanted = shapes_of(config)
    for name, shape in wanted.items():
        if name not in tensors:
            raise EngineError(f"{folder} lacks {name}, which its config.json asks for: it belongs to another model, or is incomplete")
        if (found := tensors[name].place.shape) != shape:
            raise EngineError(f"{folder}: {name} has shape {list(found)}, but its config.json needs {list(shape)}")
    known = {*wanted, HEAD}
    for name in tensors:
        if name.startswith(("model.", "lm_head.")) and name not in known and not name.endswith(COMPUTED):
            raise EngineError(
                f"{folder}: its config.json has no place for {name}, which would be ignored: correct config.json, or save the model again"
            )


def preload(config: Any) -> tuple[str, ...] | None:
    """A user's engine and vLLM may start threads or CUDA as they are imported."""
    kind = config.engine.kind
    if kind == "scripted":
        return ()
    path = ENGINES.get(made := plugins.engine_kind(config)[0], made)
    return None if kind != "torch" or may_use_cuda(config.model.device) else ("torch", path.partition(":")[0])


def shapes_of(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor that the engine computes with, by its name in a model folder."""
    e, f, d = config.hidden_size, config.intermediate_size, config.head_dim
    widths = {"q": config.num_heads * d, "k": config.num_kv_heads * d, "v": config.num_kv_heads * d}
    shapes: dict[str, tuple[int, ...]] = {model_folder.EMBED: (config.vocab_size, e), "model.norm.weight": (e,)}
    if not config.tied:
        shapes[model_folder.HEAD] = (config.vocab_size, e)
    for at in (f"model.layers.{i}." for i in range(config.num_layers)):
        shapes |= {f"{at}input_layernorm.weight": (e,), f"{at}post_attention_layernorm.weight": (e,)}
        shapes |= {f"{at}self_attn.{x}_proj.weight": (width, e) for x, width in widths.items()}
        shapes |= {f"{at}self_attn.{x}_proj.bias": (width,) for x, width in widths.items() if config.qkv_bias}
        shapes |= {f"{at}self_attn.{x}_norm.weight": (d,) for x in "qk" if config.qk_norm}
        shapes[f"{at}self_attn.o_proj.weight"] = (e, widths["q"])
        width = config.experts.size if config.experts else f
        sizes = {"gate": (width, e), "up": (width, e), "down": (e, width)}
        if config.experts:
            shapes[f"{at}mlp.gate.weight"] = (config.experts.num, e)
        for each in (f"{at}mlp.experts.{i}." for i in range(config.experts.num)) if config.experts else (f"{at}mlp.",):
            shapes |= {f"{each}{x}_proj.weight": size for x, size in sizes.items()}
        shapes |= {f"{at}mlp.{x}_proj.bias": size[:1] for x, size in sizes.items() if config.mlp_bias}
        if config.out_bias:
            shapes[f"{at}self_attn.o_proj.bias"] = (e,)
    return shapes
