"""RollArt, the end-to-end comparison: Sync, Sync+, One-off, AReaL and RollArt on the same tasks, model by model.

What each baseline is, as the paper names it; where it says no more, the reading is ours:

- sync: the GPUs roll a batch out in lock-step with batched environments, its scores are waited for, then the same GPUs train it;
- sync_plus: the same, but every trajectory goes on by itself, and is scored as it ends;
- one_off: GPUs set apart roll out the next batch, of one version, while the others train on the one before;
- areal: as rollart, on GPUs of one kind; engines stand still while they take new weights;
- rollart: two kinds of GPU with tasks mapped to them, weights through a store while engines go on.

The last two are held against the paper with the live planners for admission, hand-over and age. `areal_rule` and `rollart_rule` are the same
two by their own published rules (sim/admission/rules.py): AReaL's takes whatever is complete at whatever age, ROLL's, on which RollArt
stands, drops groups that are too old. A rollout begins under the weights that engines have. No claim is about these two.

A time to score is not simulated, for nothing learns here: systems are held to need the same number of steps.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean
from typing import NamedTuple, Self

from pydantic import Field, model_validator

from rubato.actors.samples.group import GroupLimits
from rubato.actors.samples.groups import Groups
from rubato.planning.advice import advise
from rubato.planning.hardware import GpuSpec
from rubato.planning.language_model import ModelSpec
from rubato.planning.roofline import Deployment
from rubato.runtime.config import Section
from rubato.sim.admission.job import RuledGroups
from rubato.sim.admission.rules import AdmissionRule, ArealRule, RollRule
from rubato.sim.advice import view_of
from rubato.sim.cluster import ClusterCosts, ClusterJobSpec, PoolSpec, cluster_job
from rubato.sim.job import Environments
from rubato.sim.outcome import Cell, RunProgress, RunResult, Table
from rubato.sim.rollart.batch import BatchRun
from rubato.sim.scenario import Scenario, ScenarioKind
from rubato.sim.training_model import TrainerSpec
from rubato.sim.weight_sync import Measured, StoreSync
from rubato.sim.workload import Episode, TaskSpec, episode, task_of

JOBS = ("areal", "rollart", "areal_rule", "rollart_rule")
"""Those that never stop to roll out."""

SYSTEMS = ("sync", "sync_plus", "one_off", *JOBS)


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


class EagerCosts(ClusterCosts):
    """Rollouts begin under the weights that engines have."""

    def __init__(self, spec: ClusterJobSpec, seed: int) -> None:
        super().__init__(spec, seed)
        (own,) = self.environments
        self.environments = (Environments(replace(own.manager, awaits_version=False), own.count),)


class BlockingCosts(ClusterCosts):
    """Engines stand still from the end of the step until they have its weights."""

    direct_bytes_s: float = 1.0

    async def publish(self, step: int) -> None:
        for engine in self.engines:
            engine.suspend()
        await self.timeline.sleep(self._spec.trainer.model.weight_bytes / self.direct_bytes_s)
        for engine in self.engines:
            engine.resume(step)


class EagerBlockingCosts(BlockingCosts, EagerCosts):
    """Both."""


class SteadyState(NamedTuple):
    """A system's steady state."""

    step_s: float
    tokens_s: float
    """Trained ones."""
    advice: str = ""
    """What would make a job faster that never stops to roll out."""


@dataclass(frozen=True, slots=True)
class SystemArm:
    """One model on all systems."""

    scenario: EndToEnd
    size: ModelSize

    def measured(self, system: str) -> SteadyState:
        return self._job(system) if system in JOBS else self._batches(system)

    def _batches(self, system: str) -> SteadyState:
        """Of systems whose batches are of one version: rolled out, trained, handed over."""
        scenario = self.scenario
        apart = scenario.training.count if system == "one_off" else 0
        everyone = scenario.baseline
        pools = (self._pool(everyone.model_copy(update={"count": everyone.count - apart})),)
        trainer = self._trainer(everyone.model_copy(update={"count": apart or everyone.count}))
        seconds: list[float] = []
        total = 0
        for batch in range(scenario.counted_steps):
            episodes = self._episodes(batch)
            run = BatchRun(pools)
            rollout_s = (run.lock_step(episodes) if system == "sync" else run.trajectories(episodes)).seconds
            tokens = sum(each.tokens for each in episodes)
            train_s = trainer.step_s(tokens, len(episodes))
            both_s = max(rollout_s, train_s) if apart else rollout_s + train_s
            seconds.append(both_s + self.size.model.weight_bytes / scenario.direct.bytes_s)
            total += tokens
        return SteadyState(fmean(seconds), total / sum(seconds))

    def _job(self, system: str) -> SteadyState:
        scenario, everyone = self.scenario, self.scenario.baseline
        rest = everyone.model_copy(update={"count": everyone.count - scenario.training.count})
        name, _, ruled = system.partition("_")
        gpus: Sequence[Gpus] = scenario.rollout if name == "rollart" else (rest,)
        spec = ClusterJobSpec(
            pools=tuple(self._pool(each) for each in gpus), trainer=self._trainer(scenario.training), tasks=scenario.tasks,
            weights=scenario.store, alpha=scenario.alpha, batch_groups=scenario.batch_groups,
            group_size=scenario.group_size, environments=scenario.batch_groups * scenario.group_size * (scenario.alpha + 1),
            steps=1000,
        )  # fmt: skip
        rule = {"areal_rule": ArealRule, "rollart_rule": RollRule}.get(system)
        groups_of = Groups if rule is None else partial(_ruled, rule(scenario.alpha))
        job = cluster_job(spec, scenario.seed, self._costs(name, eager=bool(ruled)), groups_of)
        job.run(scenario.warmup_steps + scenario.counted_steps)
        view = view_of(spec, job, scenario.warmup_steps)
        tokens = fmean(row.tokens for row in job.rows[scenario.warmup_steps :])
        return SteadyState(view.step_s, tokens / view.step_s, "" if ruled else advise(view).why)

    def _costs(self, name: str, *, eager: bool) -> type[ClusterCosts]:
        if name == "rollart":
            return EagerCosts if eager else ClusterCosts
        direct = {"direct_bytes_s": self.scenario.direct.bytes_s}
        if eager:
            return type("DirectCosts", (EagerBlockingCosts,), direct)
        return type("DirectCosts", (BlockingCosts,), direct)

    def _pool(self, gpus: Gpus) -> PoolSpec:
        engine = Deployment(gpu=gpus.gpu, model=self.size.model, tp=self.size.serve_tp)
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


def _ruled(rule: AdmissionRule, limits: GroupLimits, alpha: int) -> Groups:
    return RuledGroups(limits, rule)


def run(scenario: EndToEnd, progress: RunProgress) -> RunResult:
    rows: list[tuple[Cell, ...]] = []
    figures: dict[str, float | bool] = {}
    notes = ["Time to score is held to go with the time of a step: nothing is learned here, so that all need the same steps."]
    total = len(scenario.models) * len(SYSTEMS)
    for name, size in scenario.models.items():
        arm, step_s = SystemArm(scenario, size), {}
        for system in SYSTEMS:
            found = arm.measured(system)
            step_s[system] = found.step_s
            figures |= {f"step_{system}_{name}": found.step_s, f"tokens_s_{system}_{name}": found.tokens_s}
            notes += [f"advice for {system}, {name}: {found.advice}"] if found.advice else []
            progress(len(rows) * len(SYSTEMS) + len(step_s), total, f"{name} {system}")
        for system in ("sync", "sync_plus", "one_off", "areal"):
            ratio = step_s[system] / step_s["rollart"]
            figures |= {f"over_{system}_{name}": ratio, f"score_over_{system}_{name}": ratio}
        rows.append((name, *(step_s[system] for system in SYSTEMS)))
    return RunResult(
        figures=figures | _orders(figures, tuple(scenario.models)),
        tables={"phases": Table(("model", *(f"{system}_s" for system in SYSTEMS)), rows)},
        notes=notes,
    )


def _orders(figures: Mapping[str, float | bool], models: Sequence[str]) -> dict[str, bool]:
    """Which system is slower than which, for every model size."""

    def slower(one: str, other: str) -> bool:
        return all(figures[f"step_{one}_{name}"] > figures[f"step_{other}_{name}"] for name in models)

    return {
        "sync_slower_than_sync_plus": slower("sync", "sync_plus"),
        "sync_plus_slower_than_one_off": slower("sync_plus", "one_off"),
        "one_off_slower_than_areal": slower("one_off", "areal"),
        "areal_slower_than_rollart": slower("areal", "rollart"),
        "sync_slower_than_areal": slower("sync", "areal"),
    }


KIND = ScenarioKind(EndToEnd, run)
