"""`rubato fit CONFIG`: what a job takes of each device against what is there, by the model's config.json alone, and the key to turn."""

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from rubato.actors import catalog
from rubato.actors.checkpoints.devices import may_use_cuda
from rubato.actors.config import CUDA, PROJECTIONS, LoraSection, engine_specs
from rubato.actors.hub import names, repository
from rubato.planning.language_model import ModelSpec
from rubato.planning.memory import Change, Process, Serving, Training, next_change, over, report, served, trained
from rubato.runtime.config import Config
from rubato.runtime.config.compose import compose, load, pinned
from rubato.runtime.config.overrides import given
from rubato.runtime.errors import ConfigError, ExitCode

UNITS = {"": 1, "GiB": 2**30, "GB": 10**9, "MiB": 2**20, "TiB": 2**40}
GPUS = re.compile(r"(?:([1-9]\d{0,3})x)?([1-9]\d{0,3})x(\d{1,6}(?:\.\d{1,3})?)(GiB|GB|MiB|TiB)")
WIDTH = {"float32": 4, "bfloat16": 2}

NOTHING = 1
"""Bytes of a GPU that is not there."""

ATTENTION = PROJECTIONS[:4]
"""Of a layer's matrices those that can have an adapter where its others are routed experts."""

UTILIZATION = 0.9
"""vLLM's gpu_memory_utilization where none is given."""


class Inventory(NamedTuple):
    """Hosts alike: GPUs of each, bytes of each GPU, and of host memory (0: not known)."""

    hosts: int
    gpus: int
    gpu_bytes: int
    host_bytes: int


def main(argv: Sequence[str]) -> int:
    """Print it; exit code 1 where it does not fit."""
    parser = argparse.ArgumentParser(
        "rubato fit", description="Say what a job takes of each device, and what to change where it does not fit."
    )
    parser.add_argument("config", type=Path, help="a YAML file, or the name of one that is shipped")
    parser.add_argument("changes", nargs="*", default=[], metavar="key.sub=value")
    parser.add_argument("--gpus", type=_gpus, help="what to reckon with in place of this host: 8x80GiB, or 4x8x80GiB for four hosts")
    parser.add_argument("--shape", type=_shape, help="shape of the model, a name from configs/models, in place of that of model.path")
    parser.add_argument("--json", action="store_true", help="print {processes, fits, next_key}")
    asked = parser.parse_intermixed_args(argv)
    config = load(asked.config, asked.changes)
    shape = asked.shape
    if shape is None:
        is_run = asked.config.name == "config.yaml"  # a run's own, in its folder
        folder = asked.config.parent if is_run else Path(config.run.dir or f"runs/{config.run.name}")
        config, _ = pinned(config, folder.resolve())
        shape = shape_of(config, folder)
    if shape is None:
        raise ConfigError(
            f"model.path={config.model_path} has no config.json yet that says a model's shape: name a folder that has, or give --shape a name "
            "from configs/models."
        )
    there = asked.gpus or here(config)
    if not there.gpus and (device := config.section("model").device).startswith("cuda"):
        raise ConfigError(
            f"model.device is {device}, but torch sees no CUDA device here: say with --gpus what to reckon with, such as 8x80GiB."
        )
    lora = config.section("train").lora if config.has("train") else None
    if lora and shape.experts and (barred := [name for name in lora.targets if name in PROJECTIONS and name not in ATTENTION]):
        raise ConfigError(f"train.lora.targets names {barred[0]}, and routed experts get no adapter: set it to [{', '.join(ATTENTION)}].")
    processes = processes_of(config, shape, there)
    key = next_change(processes, changes_of(config, shape, there))
    if asked.json:
        print(json.dumps(report(processes, key)))  # noqa: T201
    else:
        print("\n".join([*table(processes), *_verdict(processes, key, there)]))  # noqa: T201
    return ExitCode.FAILED if over(processes) else ExitCode.DONE


def told(config: Config, folder: Path) -> tuple[list[str], list[str]]:
    """For a dry run: what the job takes, line by line, and sentences on what can't fit. Neither, where the model is not there yet."""
    if not (config.has("model") and config.has("train")):
        return [], []
    shape = shape_of(config, folder)
    if shape is None:
        return [], []
    there = here(config)
    processes = processes_of(config, shape, there)
    if not over(processes):
        return table(processes), []
    return table(processes), _verdict(processes, next_change(processes, changes_of(config, shape, there)), there)


def shape_of(config: Config, folder: Path) -> ModelSpec | None:
    """Of the model that the job computes; None where its config.json is not there, or says no shape."""
    path = config.model_path
    model = folder / path
    try:
        if config.brings_model and not model.is_dir():
            name = names.found(config.tree(filled=True)).get(("model", "path"))
            model = model if name is None else repository.described_in(name)
        return catalog.shape_of(model)
    except (ValueError, OSError):
        return None


def here(config: Config) -> Inventory:
    """This host."""
    host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    sizes = _gpu_sizes() if may_use_cuda(config.section("model").device) else []
    return Inventory(1, len(sizes), min(sizes, default=0), host)


@cache
def _gpu_sizes() -> list[int]:
    """Asked of torch in a process of its own."""
    look = "import torch; print(*[torch.cuda.get_device_properties(i).total_memory for i in range(torch.cuda.device_count())])"
    return [int(word) for word in subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, check=False).stdout.split()]


def processes_of(config: Config, shape: ModelSpec, there: Inventory) -> list[Process]:
    """Those that hold a model, each on the device that it would get: pools with `gpus` take the next ones, others what `model.device` names."""
    found: list[Process] = []
    ranks = config.section("train").mesh.size if config.has("train") else 1
    holding = [*engine_specs(config), "trainer_rank" if ranks > 1 else "trainer"]
    here = {role: config.members(role) for role in config.actors if role in holding}
    far = {role: _brought(config, role) for role in here}
    counts = dict.fromkeys(here, 0)
    taken = 0
    for members in (here, far):
        taken = there.gpus if members is far and taken else taken
        for role, pool in ((role, pool) for role, pools in members.items() for pool in pools):
            is_engine = role != holding[-1]
            index, counts[role] = counts[role], counts[role] + 1
            own: Any = config.actor_config(role, pool)
            if not (own.engine.kind in ("torch", "vllm") if is_engine else own.train.has_model):
                continue
            num = config.actors[role].pools[pool].gpus if pool else 0
            places: list[int] = []
            if there.gpus and own.model.device != "cpu":
                asked = CUDA.match(own.model.device)
                first = taken if num else index if role == "trainer_rank" else int(asked[1]) if asked else 0
                places = [first + at for at in range(num or (own.engine.degree if is_engine else 1))]
                taken += num
            for place in places or [-1]:
                room = there.host_bytes if place < 0 else there.gpu_bytes if place < there.hosts * there.gpus else NOTHING
                if is_engine:
                    taken_of, host = served(shape, _serving(own, max(1, len(places)), on_cpu=place < 0), room), 0
                else:
                    taken_of, host = trained(shape, _training(own, shape, on_cpu=place < 0))
                found.append(Process(f"{role}-{index + 1}", pool, _device(place, there), taken_of, room, host))
    return found


def _brought(config: Config, role: str) -> list[str]:
    """The pools of processes that further hosts bring."""
    pools = config.actors[role].pools
    return [
        name for kind in config.launch.hosts.values() for name, num in kind.pools.items() if name in pools for _ in range(kind.count * num)
    ]


def _device(place: int, there: Inventory) -> str:
    """By its number among all GPUs; -1 is the CPU."""
    if place < 0:
        return "cpu"
    host, own = divmod(place, there.gpus)
    return f"host-{host + 1}:cuda:{own}" if there.hosts > 1 else f"cuda:{place}"


def _training(own: Any, shape: ModelSpec, *, on_cpu: bool) -> Training:
    train = own.train
    dtype = own.model.dtype if train.dtype == "model" else train.dtype
    compute = WIDTH[dtype]
    master = WIDTH[train.master_dtype] if dtype == "bfloat16" else WIDTH["float32"]
    adapter = adapter_params(shape, train.lora) if train.lora is not None else 0
    tokens = max(train.micro_batch_tokens, getattr(getattr(own, "rollout", None), "max_len", 0))
    return Training(
        tokens, compute, master, train.mesh.shard, train.mesh.size > 1, train.gradient_checkpointing, train.mesh.offload, adapter,
        bool(train.kl_coef) and (bool(train.reference) or not adapter), on_cpu,
    )  # fmt: skip


def _serving(own: Any, degree: int, *, on_cpu: bool) -> Serving:
    engine = own.engine
    share = float(engine.vllm.get("gpu_memory_utilization", UTILIZATION)) if engine.kind == "vllm" and not on_cpu else 0.0
    return Serving(
        WIDTH[own.model.dtype], engine.num_slots, engine.max_len, engine.max_batch_tokens, degree, share, own.train.lora is not None, on_cpu
    )


def adapter_params(shape: ModelSpec, lora: LoraSection) -> int:
    """Of a LoRA over a model of `shape`; routed experts have none."""
    q, kv, ffn = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim, shape.ffn or shape.shared_ffn
    sides = {
        "q_proj": shape.hidden + q, "k_proj": shape.hidden + kv, "v_proj": shape.hidden + kv, "o_proj": shape.hidden + q,
        **dict.fromkeys(("gate_proj", "up_proj", "down_proj") if ffn else (), shape.hidden + ffn),
    }  # fmt: skip
    return max(1, shape.layers * lora.rank * sum(size for name, size in sides.items() if name in lora.targets))


def changes_of(config: Config, shape: ModelSpec, there: Inventory) -> Iterator[Change]:
    """Keys that take memory off, those first that cost least time; where GPUs are missing, those alone that do with what is there."""
    if missing := _missing(processes_of(config, shape, there)):
        yield from (change for change in _changed(config, shape, there, _fewer(config, len(missing))) if not _missing(change.processes))
        return
    train, engine, ranks = config.section("train"), config.section("engine"), config.section("train").mesh.size
    free = there.gpus - sum(pool.count * pool.gpus for spec in engine_specs(config).values() for pool in spec.pools.values())
    wanted = [
        ("train.gradient_checkpointing", True, not train.gradient_checkpointing),
        ("engine.num_slots", engine.num_slots // 2, engine.kind == "torch" and engine.num_slots > 1),
        ("engine.num_slots", engine.num_slots // 8, engine.kind == "torch" and engine.num_slots > 8),
        ("train.micro_batch_tokens", train.micro_batch_tokens // 4, train.micro_batch_tokens > 1024),
        ("model.dtype", "bfloat16", config.section("model").dtype == "float32"),
        *(("train.mesh.shard", num, ranks < num <= free) for num in (2, 4, 8, free) if train.lora is None),
        ("train.mesh.offload", True, ranks > 1 and not train.mesh.offload and there.gpus > 0),
        ("train.lora", {"targets": ATTENTION} if shape.experts else {}, train.lora is None),
    ]
    yield from _changed(config, shape, there, [(key, value) for key, value, applies in wanted if applies])


def _missing(processes: Sequence[Process]) -> set[str]:
    """GPUs that processes would have and that are not there."""
    return {each.device for each in processes if each.available == NOTHING}


def _fewer(config: Config, missing: int) -> Iterator[tuple[str, int]]:
    """Keys with which a job has so many GPUs less."""
    mesh = config.section("train").mesh
    if mesh.shard * mesh.replicate > missing:
        yield "train.mesh.shard", mesh.shard - -(-missing // mesh.replicate)
    for role, spec in engine_specs(config).items():
        for name, pool in spec.pools.items():
            if pool.gpus and pool.count * pool.gpus > missing:
                yield f"actors.{role}.pools.{name}.count", pool.count - -(-missing // pool.gpus)


def _changed(config: Config, shape: ModelSpec, there: Inventory, changes: Iterable[tuple[str, object]]) -> Iterator[Change]:
    tree = config.tree()
    for key, value in changes:
        try:  # as a run that goes on with another mesh, whose ranks came with the one before
            changed = compose(given(tree, [f"{key}={msgspec.json.encode(value).decode()}"]), before=tree)
        except ConfigError:
            continue
        yield Change(f"{key}={json.dumps(value)}", processes_of(changed, shape, there))


def table(processes: Sequence[Process]) -> list[str]:
    """One line for each process."""
    lines = [
        f"{'actor':<16} {'device':<14} {'weights':>8} {'grads':>7} {'master':>7} {'optim':>7} {'activ':>7} {'kv':>7} {'total':>7} {'of':>7}  GiB"
    ]
    for each in processes:
        b = each.bytes
        cells = [b.weights, b.grads, b.master, b.optimizer, b.activations, b.kv, b.total, each.available]
        numbers = " ".join(f"{cell / 2**30:>{8 if at == 0 else 7}.1f}" for at, cell in enumerate(cells))
        lines.append(f"{each.actor:<16} {each.device:<14} {numbers}")
    return lines


def _verdict(processes: Sequence[Process], key: str, there: Inventory) -> list[str]:
    on = {device: ", ".join(each.actor for each in processes if each.device == device) for device in over(processes)}
    missing = _missing(processes)
    wrong = [
        f"{on[device]} would have {device}, but of {there.hosts * there.gpus} GPUs there is none left."
        if device in missing
        else f"{on[device]} would take {more / 2**30:.1f} GiB more than {device} has."
        for device, more in over(processes).items()
    ]
    if wrong and key:
        wrong[-1] += f" Set {shlex.quote(key)}."
    return wrong or ["it fits"]


def _gpus(text: str) -> Inventory:
    found = GPUS.fullmatch(text)
    size = int(float(found[3]) * UNITS[found[4]]) if found else 0
    if found is None or not size:
        raise argparse.ArgumentTypeError(f"{text[:64]!r} is not of the form 8x80GiB, nor 4x8x80GiB")
    return Inventory(int(found[1] or 1), int(found[2]), size, 0)


def _shape(name: str) -> ModelSpec:
    try:
        return catalog.model(name)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
