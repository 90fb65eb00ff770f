"""Needs of a job, as its config says: GPUs, host memory, a step with every response at max_tokens; and the GPUs of the place that it is given."""

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rubato.actors import catalog
from rubato.actors.checkpoints.model_folder import num_parameters
from rubato.actors.cluster.pools import SchedulerSection
from rubato.actors.messages.cluster import JobNeeds
from rubato.planning.roofline import Roofline
from rubato.runtime.config import ActorSpec, Config
from rubato.runtime.config.sections import DEVICES
from rubato.runtime.config.yaml_core import dump_yaml, read_yaml

ENGINE, TRAINER, ENVIRONMENTS = "engine", "trainer", "env_manager"
"""Roles that compute on the rollout pool, on the training pool, and on the cores of rollout nodes."""

PLACER = "rubato.actors.cluster.placer:ClusterPlacer"

TRAIN_BYTES = {"float32": 18, "bfloat16": 8}
"""Per parameter: weights, summed gradients and AdamW's states, by `train.master_dtype`."""
WEIGHT_BYTES = {"float32": 4, "bfloat16": 2}


def needs_of(job: Config) -> JobNeeds:
    """Of a job that may run anywhere: `job` has both roles."""
    engines, params = job.actors[ENGINE], _parameters(job)
    trains = job.section("train").master_dtype if job.has("train") else "float32"
    dtype = job.section("model").dtype if job.has("model") else "float32"
    return JobNeeds(
        rollout_gpus=_gpus(engines), train_gpus=_gpus(job.actors[TRAINER]),
        rollout_bytes=float(params * WEIGHT_BYTES[dtype] * engines.count), train_bytes=float(params * TRAIN_BYTES[trains]),
        rollout_s=_rollout_s(job, engines.count), train_s=_train_s(job), engines=max(1, engines.count),
        max_tokens=max(_tokens(job)) if job.has("rollout") else 0, steps=job.run.steps, cores=_cores(job),
    )  # fmt: skip


def _gpus(spec: ActorSpec) -> int:
    return sum(pool.count * pool.gpus for pool in spec.pools.values()) or spec.count


def _parameters(job: Config) -> int:
    """Of the model whose times count, or of the one that is computed; 0 where it is made only when the job begins."""
    pace: Any = job.section("engine").pace if job.has("engine") else None
    if pace is not None:
        return catalog.model(pace.model).params
    return num_parameters(Path(job.model_path)) if job.model_path else 0


def _rollout_s(job: Config, engines: int) -> float:
    """Every response at max_tokens, in as many waves as there are slots; 0 where an engine's time is not known beforehand."""
    if not (job.has("engine") and job.has("rollout") and job.has("train")):
        return 0.0
    engine, train = job.section("engine"), job.section("train")
    tokens = max(_tokens(job))
    num = train.batch_groups * train.group_size
    slots = min(num, engine.num_slots * max(1, engines))
    step_s = _step_s(engine, math.ceil(slots / max(1, engines)), tokens)
    return math.ceil(num / slots) * tokens * step_s


def limit_over(row: Mapping[str, float], needs: JobNeeds) -> float:
    """How many times as many tokens the step of that row would have with every response at max_tokens; 0 where the row doesn't say.

    A step's time over its tokens is the most where few sequences were left to decode, so a step of that many takes no longer than
    so many times as long: RollMux (section 4.2) plans with that.
    """
    sampled = row.get("rollout/sampled_mean", 0.0)
    return max(1.0, needs.max_tokens / sampled) if sampled > 0 and needs.max_tokens else 0.0


def _tokens(job: Config) -> list[int]:
    """Most of one trajectory, for each task."""
    rollout = job.section("rollout")
    tasks: dict[str, Any] = dict(job.section("tasks")) if job.has("tasks") else {}
    return [
        min(
            (getattr(each, "max_turns", None) or rollout.max_turns) * (getattr(each, "max_new_tokens", None) or rollout.max_new_tokens),
            rollout.max_len,
        )
        for each in (tasks.values() or [rollout])
    ]


def _step_s(engine: Any, batch: int, tokens: int) -> float:
    """One token for each of `batch` requests."""
    if engine.pace is not None:
        return engine.pace.scale * Roofline(catalog.deployed(engine.pace.hardware, engine.pace.model, engine.pace.degree)).step_s(
            batch, batch * tokens / 2
        )
    return engine.scripted.token_s if engine.kind == "scripted" else 0.0


def _cores(job: Config) -> float:
    """A core for each environment manager, or for each of its workers where the job says how many."""
    if not job.has("env"):
        return 0.0
    workers = job.section("env").workers
    each = workers if isinstance(workers, int) else 1
    return float(each * sum(spec.count for role, spec in job.actors.items() if role == ENVIRONMENTS))


def _train_s(job: Config) -> float:
    train = job.section("train") if job.has("train") else None
    return train.scripted.step_s if train is not None and train.kind == "scripted" else 0.0


# -- GPUs of the job's place --------------------------------------------------------------------------------


def prepared(config: str, section: SchedulerSection) -> str:
    """The job's config, in which each role that computes has pools whose GPUs its place names, where the cluster names any."""
    tree: dict[str, Any] = read_yaml(config)
    for role, pool, has in _roles(section):
        spec = tree["actors"][role]
        if not has:
            continue
        if not spec.get("pools"):
            spec["pools"] = {pool: {"count": spec.pop("count", 1)}}
        for each in spec["pools"].values():
            each["gpus"] = 0  # or it would say twice which
    return dump_yaml(tree)


def overrides(config: str, section: SchedulerSection, node: int, group: int) -> list[str]:
    """What a life of the job at that place is launched with. `config` is prepared."""
    actors: dict[str, Any] = read_yaml(config)["actors"]
    return [
        f"actors.{role}.pools.{name}.env.{DEVICES}='{devices}'"
        for role, _, devices in _roles(section, node, group)
        if devices
        for name in actors[role]["pools"]
    ]


# -- hosts of the job's place --------------------------------------------------------------------------------


def check_hosts(name: str, config: str) -> str:
    """Why the job can't be placed on hosts of the cluster, if it can't: it says itself where it runs."""
    tree: dict[str, Any] = read_yaml(config)
    for section, key in (("launch", "hosts"), ("bus", "host")):
        if given := (tree.get(section) or {}).get(key):
            return f"job {name} has {section}.{key}={given}, and nodes of this cluster lie on several hosts: it says which. Leave it out."
    return ""


def on_host(config: str, label: str, address: str, labels: Iterable[str] = ()) -> list[str]:
    """What a life of the job is launched with whose rollout node lies on the host with this label; empty on the cluster's own.

    `address` is where other hosts reach the cluster's, and `labels` are its own, by which weights find their way.
    """
    tree: dict[str, Any] = read_yaml(config)
    actors, own = tree["actors"], sorted({*labels, *(tree.get("host") or {}).get("labels", ())})
    counts = [
        (f"actors.{role}.pools.{pool}.count", pool, each.get("count", 1)) if pool else (f"actors.{role}.count", role, each.get("count", 1))
        for role in (ENGINE, ENVIRONMENTS)
        if role in actors
        for pool, each in (actors[role].get("pools") or {"": actors[role]}).items()
    ]
    brought = {part: num for _, part, num in counts if num}
    hosts = {"rollout": {"pools": brought, "labels": [label]}} if label else {}
    return [
        *(f"{key}={0 if label else num}" for key, _, num in counts), f"bus.host='{address}'", f"launch.hosts={json.dumps(hosts)}",
        f"launch.backend={PLACER if label else 'here'}", f"host.labels={json.dumps(own)}",
    ]  # fmt: skip


def _roles(section: SchedulerSection, node: int = 0, group: int = 0) -> list[tuple[str, str, str]]:
    """Role, the name of its pool where it had none, and the GPUs that it has there."""
    return [(ENGINE, "rollout", section.rollout.devices_of(node)), (TRAINER, "training", section.training.devices_of(group))]
