"""Jobs that share pools, in the second mode: the real scheduler gives them their places, and their real proxies, engines and trainers take turns.

What is modelled is time: of resets, of a rollout, of an update, and of loading a job's states before each of the two. A scheduler's jobs
are embedded beside it, not launched.
"""

import asyncio
import json
import signal
from collections.abc import Collection, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import msgspec
from pydantic import Field

import rubato.actors.cluster.permits
import rubato.actors.cluster.scheduler
from rubato.actors.checkpoints.hf_files import read_header
from rubato.actors.cluster.board import HeldTime, held_times
from rubato.actors.cluster.book import Book, JobRecord
from rubato.actors.cluster.job import JobFiles, files
from rubato.actors.cluster.lease import Held
from rubato.actors.cluster.lives import JobLife
from rubato.actors.cluster.permits import Permits
from rubato.actors.cluster.pools import GB, SchedulerSection
from rubato.actors.cluster.scheduler import ClusterScheduler
from rubato.actors.cluster.token import make_token, read_token
from rubato.actors.messages.cluster import JobAccepted, JobNeeds, StopJobs, SubmitJob
from rubato.actors.messages.samples import Batch, Trajectory
from rubato.actors.scripted.engine import ScriptedEngine
from rubato.actors.training.train_engine import StepResult
from rubato.actors.training.trainer import Trainer
from rubato.planning.coexecution import CoexecutionGroup, JobProfile, NodePool, SharedCluster
from rubato.planning.round_robin import WARM
from rubato.runtime.config import Config, Section
from rubato.runtime.config.compose import from_mapping, load
from rubato.runtime.embed import embed
from rubato.runtime.errors import ExitCode
from rubato.runtime.memory import MemoryStore
from rubato.runtime.observe.trace import wall_s
from rubato.sim.simtest.run import RARE, replaced
from rubato.sim.simtest.toys import write_tokenizer
from rubato.sim.virtual import run_virtual

ROUNDS = 8
"""A run lasts as long as so many of its longest job's steps alone, and as many more as its bound allows."""

LIMIT_S = 1e6
LONG_S = 3600.0
"""Deadlines that must never pass here."""

GROUP = 2


class LoadedEngine(ScriptedEngine):
    """Its states come to the device as it wakes, which lasts `engine.scripted.update_s`."""

    async def update(self, version: int, weights: memoryview) -> float:
        read_header(weights, f"weights version {version}")
        self._version = version
        return 0.0

    async def wake(self) -> float:
        if self._asleep:
            await asyncio.sleep(self._script.update_s)
        return await super().wake()


class UpdateSection(Section):
    """What an update lasts, in seconds."""

    train_s: float = Field(gt=0)
    load_s: float = Field(default=0.0, ge=0)
    """Loading its states before it, where the pool is shared."""


class TimedTrainer(Trainer):
    """Its updates last what its section says, under the permit."""

    class Config(Trainer.Config):
        update: UpdateSection

    config: Config  # pyright: ignore[reportIncompatibleVariableOverride] - the base class only reads its own sections

    async def _trained(self, step: int, batch: Batch, held: Held) -> tuple[list[list[Trajectory]], StepResult]:
        update = self.config.update
        await asyncio.sleep(update.train_s + (update.load_s if self.config.cluster.dir else 0.0))
        return await super()._trained(step, batch, held)


class SlowReset:
    """One turn, after a reset of `reset_s` seconds."""

    def __init__(self, reset_s: float) -> None:
        self._reset_s = reset_s

    async def reset(self, *, seed: int) -> tuple[str, Mapping[str, Any]]:
        await asyncio.sleep(self._reset_s)
        return "a b", {}

    async def step(self, action: str) -> tuple[str, float, bool, bool, Mapping[str, Any]]:
        return "", float(len(action) % 2), True, False, {}

    def close(self) -> None:
        """Nothing is held."""


class EmbeddedLife(JobLife):
    """A job in its scheduler's own loop, until it is stopped. One that comes back, at another place, is refused by its folder."""

    def __init__(self, folder: Path, kept: JobFiles, overrides: Sequence[str]) -> None:
        super().__init__(folder, kept)
        self._overrides, self._stopped = overrides, asyncio.Event()

    async def ended(self) -> int:
        async with embed(load(self._kept.config, self._overrides), self._folder):
            await self._stopped.wait()
        return ExitCode.INTERRUPTED

    def stop(self, number: signal.Signals = signal.SIGINT) -> None:
        self._stopped.set()

    def last_words(self) -> str:
        return ""


class EmbeddingScheduler(ClusterScheduler):
    """Embeds the jobs that it starts."""

    def _begin_life(self, record: JobRecord) -> JobLife:
        folder = self._folder(record.name)
        return EmbeddedLife(folder, files(folder), self._overrides(record))


class SharedRun(NamedTuple):
    """Jobs that shared a cluster."""

    step_s: Mapping[str, float]
    """Mean step of each, once all are under way."""
    groups: Sequence[CoexecutionGroup]
    """Where they were at the end."""


def shared(jobs: Sequence[JobProfile], cluster: SharedCluster, folder: Path) -> SharedRun:
    """Submit `jobs` one after another, and let them take turns. `folder` is empty.

    Raises ValueError where one needs several nodes, which no job of a live cluster has, or is refused.
    """
    for job in jobs:
        if max(job.rollout_nodes, job.train_nodes) > 1:
            raise ValueError(f"job {job.name} needs {job.rollout_nodes} rollout nodes: a live job has one of each pool")
    return run_virtual(lambda: _shared(jobs, cluster, folder), limit_s=LIMIT_S)


def alone(job: JobProfile, folder: Path) -> float:
    """Mean step of `job` on nodes of its own, in seconds."""

    async def run() -> float:
        with replaced(RARE):
            async with embed(_config(job, write_tokenizer(folder / "model")), folder / job.name):
                await asyncio.sleep(ROUNDS * sum(job.longest))
        return fmean(end - begin for begin, end in _steps(folder / job.name)[WARM:])

    return run_virtual(run, limit_s=LIMIT_S)


def turns(jobs: Sequence[tuple[JobProfile, str]], cluster: SharedCluster, folder: Path) -> Mapping[str, Sequence[HeldTime]]:
    """Let `jobs` take turns, each on the rollout pool named beside it and all on the pool `training`: who held each pool, and when.

    `folder` is empty. There is no scheduler: a pool may have more jobs than one would give it.
    """

    async def run() -> Mapping[str, Sequence[HeldTime]]:
        store, model = MemoryStore(), write_tokenizer(folder / "model")
        async with AsyncExitStack() as running:
            running.enter_context(_open(store))
            for job, pool in jobs:
                pools = [f"cluster.rollout_pool={pool}", "cluster.training_pool=training"]
                config = _config(job, model, str(folder), cluster, pools)
                await running.enter_async_context(embed(config, folder / job.name))
            await asyncio.sleep(ROUNDS * sum(sum(job.longest) for job, _ in jobs))
            return await held(Permits(store), {"training", *(pool for _, pool in jobs)})

    return run_virtual(run, limit_s=LIMIT_S)


async def held(permits: Permits, pools: Collection[str]) -> Mapping[str, Sequence[HeldTime]]:
    """Who held each of `pools` so far, and when."""
    now_s = wall_s()
    return {pool: held_times([event for _, event in await permits.events(pool)], now_s) for pool in sorted(pools)}


def _open(permits: MemoryStore) -> replaced:
    """While the block runs, every cluster's permits are in this store."""

    def opened(_: Path) -> MemoryStore:
        return permits

    modules = (rubato.actors.cluster.permits, rubato.actors.cluster.scheduler)
    return replaced({(module, "open_shared"): opened for module in modules} | RARE)


async def _shared(jobs: Sequence[JobProfile], cluster: SharedCluster, folder: Path) -> SharedRun:
    section = SchedulerSection.model_validate(
        {"rollout": _pool(cluster.rollout, len(jobs)), "training": _pool(cluster.train, len(jobs)), "residents": cluster.residents}
    )  # fmt: skip
    name = f"{__name__}:{EmbeddingScheduler.__name__}"
    config = from_mapping({"run": {"name": "lab"}, "actors": {"scheduler": {"class": name}}, "scheduler": section})
    place, store, permits, model = folder / "lab", MemoryStore(), MemoryStore(), write_tokenizer(folder / "model")
    place.mkdir()
    make_token(place)

    with _open(permits):
        async with embed(config, place, store=store) as running:
            scheduler = running.ref("scheduler-1")
            for job in jobs:
                asked = _submission(job, cluster, read_token(place), _config(job, model, str(place), cluster))
                reply = await scheduler.ask(asked, timeout=LONG_S)
                if not isinstance(reply, JobAccepted):
                    raise ValueError(reply.why)
            await asyncio.sleep(ROUNDS * max(job.slo * sum(job.longest) for job in jobs))
            records = [msgspec.msgpack.decode(each, type=JobRecord) for each in (await store.scan("jobs/")).values()]
            ended_s = asyncio.get_running_loop().time()
            await scheduler.ask(StopJobs(read_token(place)), timeout=LONG_S)
    steps = {job.name: _steps(place / "jobs" / job.name) for job in jobs}
    began_s = max(own[WARM][0] for own in steps.values())
    within = {name: [e - b for b, e in own if began_s <= b and e <= ended_s] for name, own in steps.items()}
    return SharedRun({name: fmean(own) for name, own in within.items()}, Book(section, records).groups())


def _pool(pool: NodePool, nodes: int) -> dict[str, float]:
    return {"nodes": min(nodes, pool.nodes), "usd_hour": pool.usd_hour, "memory_gb": pool.memory_bytes / GB}


def _submission(job: JobProfile, cluster: SharedCluster, token: str, config: Config) -> SubmitJob:
    needs = JobNeeds(0, 0, job.rollout_bytes, job.train_bytes, job.rollout_s, job.train_s)
    return SubmitJob(token, job.name, job.name, config.dump(), ".", job.slo, needs)


def _config(job: JobProfile, model: Path, place: str = "", cluster: SharedCluster | None = None, overrides: Sequence[str] = ()) -> Config:
    """One token is the whole rollout."""
    rollout_load_s, train_load_s = (cluster.rollout.switch_s, cluster.train.switch_s) if cluster else (0.0, 0.0)
    return from_mapping(
        {
            "run": {"name": job.name, "steps": 1 << 20},
            "actors": {
                "sample_buffer": {"class": "rubato.actors.samples.buffer:SampleBuffer"},
                "llm_proxy": {"class": "rubato.actors.proxy.proxy:LLMProxy"},
                "engine": {"class": "rubato.actors.engines.worker:EngineWorker"},
                "env_manager": {"class": "rubato.actors.envs.manager:EnvManager"},
                "trainer": {"class": f"{__name__}:{TimedTrainer.__name__}"},
            },
            "model": {"path": str(model)},
            "env": {
                "class": f"{__name__}:{SlowReset.__name__}", "kwargs": {"reset_s": job.environment_s}, "concurrency": GROUP,
                "isolation": "inline", "reset_timeout_s": LONG_S,
            },
            "engine": {
                "kind": f"{__name__}:{LoadedEngine.__name__}", "num_slots": GROUP,
                "scripted": {"token_s": job.rollout_s, "update_s": rollout_load_s, "stop_share": 0},
            },
            "rollout": {"max_turns": 1, "max_new_tokens": 1, "generate_timeout_s": LONG_S},
            "staleness": {"alpha": 0},
            "train": {"kind": "scripted", "batch_groups": 1, "group_size": GROUP, "scripted": {"step_s": 0}},
            "update": {"train_s": job.train_s, "load_s": train_load_s},
            "check": {"enabled": False},
            "eval": {"every": 0, "final_num_tasks": 0},
            "cluster": {"dir": place, "job": job.name},
        },
        overrides,
    )  # fmt: skip


def _steps(folder: Path) -> list[tuple[float, float]]:
    """When each step of the job in `folder` began and ended, but for the first."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [(row["time/unix_s"] - row["time/step"], row["time/unix_s"]) for row in rows[1:]]
