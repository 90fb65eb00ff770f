"""RollArt, the end-to-end comparison: Sync, Sync+, One-off, AReaL and RollArt on the same tasks, model by model.

What each baseline is, as the paper names it; where it says no more, the reading is ours:

- sync: the GPUs roll a batch out in lock-step with batched environments, then the same GPUs train it;
- sync_plus: the same, but every trajectory goes on by itself;
- one_off: GPUs set apart roll out the next batch, of one version, while the others train on the one before;
- areal: as rollart, on GPUs of one kind; engines stand still while they take new weights;
- rollart: two kinds of GPU with tasks mapped to them, weights through a store while engines go on.

A time to score is not simulated, for nothing learns here: systems are held to need the same number of steps.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Self

from pydantic import Field, model_validator

from planning.advice import advise
from planning.hardware import GpuSpec
from planning.language_model import ModelSpec
from planning.roofline import EngineSpec
from runtime.config import Section
from sim.advice import view_of
from sim.cluster import ClusterCosts, ClusterJobSpec, PoolSpec, cluster_job
from sim.outcome import Cell, RunProgress, RunResult, Table
from sim.rollart.batch import BatchRun
from sim.scenario import Scenario, ScenarioKind
from sim.training_model import TrainerSpec
from sim.weight_sync import Measured, StoreSync
from sim.workload import Episode, TaskSpec, episode, task_of

SYSTEMS = ("sync", "sync_plus", "one_off", "areal", "rollart")


class Gpus(Section):
    """GPUs of one kind."""

    name: str
    gpu: GpuSpec
    count: int = Field(ge=1)
    tasks: tuple[str, ...] = ()
    """Task domains that are sent here; none means that every domain may come."""


class ModelSize(Section):
    """A model and how it lies on GPUs."""

    model: ModelSpec
    serve_tp: int = Field(ge=1)
    train_tp: int = Field(ge=1)


class EndToEnd(Scenario):
    """Every model on every system."""

    models: dict[str, ModelSize] = Field(min_length=1)
    rollout: tuple[Gpus, ...] = Field(min_length=1)
    """RollArt's."""
    training: Gpus
    """RollArt's; One-off and AReaL set as many apart."""
    baseline: Gpus
    """All that a baseline has."""
    tasks: tuple[TaskSpec, ...] = Field(min_length=1)
    store: StoreSync
    """RollArt's weights."""
    direct: Measured
    """The baselines' weights, GPU to GPU."""
    alpha: int = Field(default=1, ge=1)
    """Bound of RollArt and AReaL."""
    batch_groups: int = Field(ge=1)
    group_size: int = Field(ge=2)
    warmup_steps: int = Field(ge=1)
    counted_steps: int = Field(ge=1)
    """Batches of the synchronous systems are as many."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.training.count >= self.baseline.count:
            raise ValueError("baseline.count must be above training.count: the others roll out")
        return self


class BlockingCosts(ClusterCosts):
    """Engines stand still from the end of the step until they have its weights."""

    direct_bytes_s: float = 1.0

    async def publish(self, step: int) -> None:
        for engine in self.engines:
            engine.suspend()
        await self.timeline.sleep(self._spec.trainer.model.weight_bytes / self.direct_bytes_s)
        for engine in self.engines:
            engine.resume(step)


@dataclass(frozen=True, slots=True)
class SystemArm:
    """One model on all systems."""

    scenario: EndToEnd
    size: ModelSize

    def step_s(self, system: str) -> tuple[float, str]:
        """Seconds of a step in the steady state; for a job that never stops to roll out also what would make it faster."""
        return self._job_s(system) if system in ("areal", "rollart") else (self._batch_s(system), "")

    def _batch_s(self, system: str) -> float:
        """Of systems whose batches are of one version: rolled out, trained, handed over."""
        scenario = self.scenario
        apart = scenario.training.count if system == "one_off" else 0
        everyone = scenario.baseline
        pools = (self._pool(everyone.model_copy(update={"count": everyone.count - apart})),)
        trainer = self._trainer(everyone.model_copy(update={"count": apart or everyone.count}))
        seconds: list[float] = []
        for batch in range(scenario.counted_steps):
            episodes = self._episodes(batch)
            run = BatchRun(pools)
            rollout_s = (run.lock_step(episodes) if system == "sync" else run.trajectories(episodes)).seconds
            train_s = trainer.step_s(sum(each.tokens for each in episodes), len(episodes))
            both_s = max(rollout_s, train_s) if apart else rollout_s + train_s
            seconds.append(both_s + self.size.model.weight_bytes / scenario.direct.bytes_s)
        return fmean(seconds)

    def _job_s(self, system: str) -> tuple[float, str]:
        scenario, everyone = self.scenario, self.scenario.baseline
        rest = everyone.model_copy(update={"count": everyone.count - scenario.training.count})
        gpus: Sequence[Gpus] = scenario.rollout if system == "rollart" else (rest,)
        spec = ClusterJobSpec(
            pools=tuple(self._pool(each) for each in gpus), trainer=self._trainer(scenario.training), tasks=scenario.tasks,
            weights=scenario.store, alpha=scenario.alpha, batch_groups=scenario.batch_groups,
            group_size=scenario.group_size, environments=scenario.batch_groups * scenario.group_size * (scenario.alpha + 1),
            steps=1000,
        )  # fmt: skip
        job = cluster_job(spec, scenario.seed, ClusterCosts if system == "rollart" else self._blocking())
        job.run(scenario.warmup_steps + scenario.counted_steps)
        view = view_of(spec, job, scenario.warmup_steps)
        return view.step_s, advise(view).why

    def _blocking(self) -> type[ClusterCosts]:
        return type("DirectCosts", (BlockingCosts,), {"direct_bytes_s": self.scenario.direct.bytes_s})

    def _pool(self, gpus: Gpus) -> PoolSpec:
        engine = EngineSpec(gpu=gpus.gpu, model=self.size.model, tp=self.size.serve_tp)
        return PoolSpec(name=gpus.name, engine=engine, count=max(1, gpus.count // engine.num_gpus), tasks=gpus.tasks)

    def _trainer(self, gpus: Gpus) -> TrainerSpec:
        return TrainerSpec(gpu=gpus.gpu, model=self.size.model, gpus=gpus.count, tp=self.size.train_tp)

    def _episodes(self, batch: int) -> list[Episode]:
        scenario = self.scenario
        found: list[Episode] = []
        for group in range(scenario.batch_groups):
            task = task_of(scenario.tasks, scenario.seed, f"{batch}/g{group}")
            found += [episode(task, scenario.seed, f"{batch}/g{group}.{i}") for i in range(scenario.group_size)]
        return found


def run(scenario: EndToEnd, progress: RunProgress) -> RunResult:
    rows: list[tuple[Cell, ...]] = []
    figures: dict[str, float | bool] = {}
    notes = [
        "Time to score is held to go with the time of a step: nothing is learned here, so that all need the same steps."
    ]
    total = len(scenario.models) * len(SYSTEMS)
    for name, size in scenario.models.items():
        arm, step_s = SystemArm(scenario, size), {}
        for system in SYSTEMS:
            step_s[system], advised = arm.step_s(system)
            notes += [f"advice for {system}, {name}: {advised}"] if advised else []
            progress(len(rows) * len(SYSTEMS) + len(step_s), total, f"{name} {system}")
        figures |= {f"step_{system}_{name}": seconds for system, seconds in step_s.items()}
        for system in SYSTEMS[:-1]:
            ratio = step_s[system] / step_s["rollart"]
            figures |= {f"over_{system}_{name}": ratio, f"score_over_{system}_{name}": ratio}
        rows.append((name, *(step_s[system] for system in SYSTEMS)))
    return RunResult(
        figures=figures,
        tables={"phases": Table(("model", *(f"{system}_s" for system in SYSTEMS)), rows)},
        notes=notes,
    )


KIND = ScenarioKind(EndToEnd, run)
