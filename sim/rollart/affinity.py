"""RollArt, R1: which GPU suits which task at equal cost, where the choice turns, and what a mixed cluster gains.

In the mixed cluster tasks go where the live planner of `affinity: learned` says, which plans anew with each batch; `mapped` is the same
cluster with each task sent to one class by hand, as the paper's users do.
"""

from collections.abc import Sequence
from typing import Any, Self

from pydantic import Field, PositiveInt, model_validator

from rubato.planning.hardware import GpuSpec
from rubato.runtime.config import Section
from rubato.sim.cluster import PoolSpec
from rubato.sim.distribution import Constant
from rubato.sim.outcome import Cell, Plot, RunProgress, RunResult, Table
from rubato.sim.rollart.batch import BatchRun
from rubato.sim.scenario import Scenario, ScenarioKind
from rubato.sim.workload import Episode, TaskSpec, episode, task_of


class Cluster(Section):
    """Pools that together cost about what the others do."""

    pools: tuple[PoolSpec, ...] = Field(min_length=1)


class Crossover(Section):
    """Single-turn requests of `sampled` tokens behind prompts of each of these lengths, rising."""

    sampled: int = Field(ge=1)
    prompts: tuple[PositiveInt, ...] = Field(min_length=2)


class Affinity(Scenario):
    """Two small pools of equal cost, and three clusters of equal cost."""

    compute: PoolSpec
    """Few GPUs of much compute."""
    bandwidth: PoolSpec
    """More GPUs of much bandwidth."""
    tasks: tuple[TaskSpec, ...] = Field(min_length=1)
    trajectories: int = Field(ge=1)
    crossover: Crossover
    mixed: Cluster
    """What is observed says which pool serves which task."""
    mapped: dict[str, str]
    """Task → pool of the mixed cluster."""
    alone: dict[str, Cluster]
    """Clusters of one kind of GPU that the mixed one is held against."""
    concurrency: int = Field(ge=1)
    """Rollouts at once, in the clusters."""
    batch: int = Field(ge=1)
    """Rollouts between two weight versions, at each of which is planned anew."""
    warmup: int = Field(ge=1)
    """Rollouts before a cluster's time is taken: it fills, and learns."""
    counted: int = Field(ge=1)
    """Rollouts after which it is read, while others still run."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        pools, tasks = {pool.name for pool in self.mixed.pools}, {task.name for task in self.tasks}
        if self.mapped.keys() != tasks or not set(self.mapped.values()) <= pools:
            raise ValueError(f"mapped must have a pool of {', '.join(sorted(pools))} for each of {', '.join(sorted(tasks))}")
        return self

    def by_hand(self) -> Cluster:
        """The mixed cluster as `mapped`."""
        named = {pool.name: tuple(task for task, to in self.mapped.items() if to == pool.name) for pool in self.mixed.pools}
        return Cluster(pools=tuple(pool.model_copy(update={"tasks": named[pool.name]}) for pool in self.mixed.pools))


def run(scenario: Affinity, progress: RunProgress) -> RunResult:
    total = len(scenario.tasks) + len(scenario.crossover.prompts) + 2 + len(scenario.alone)
    rows: list[tuple[Cell, ...]] = []
    figures: dict[str, float | bool] = {}
    for task in scenario.tasks:
        compute, bandwidth = _on_both(scenario, task)
        figures[f"{task.name}_compute_over_bandwidth"] = compute / bandwidth
        figures[f"{task.name}_bandwidth_over_compute"] = bandwidth / compute
        rows.append((task.name, compute, bandwidth))
        progress(len(rows), total, task.name)
    for prompt in scenario.crossover.prompts:
        rows.append((f"prompt_{prompt}", *_on_both(scenario, _single(prompt, scenario.crossover.sampled))))
        progress(len(rows), total, f"prompts of {prompt}")
    ratios = [float(row[1]) / float(row[2]) for row in rows[len(scenario.tasks) :]]
    figures["crossover_prompt"] = crossing(scenario.crossover.prompts, ratios)
    figures["short_prompts_favour_bandwidth"], figures["long_prompts_favour_compute"] = ratios[0] > 1, ratios[-1] < 1
    mixed_s, plans = _cluster_s(scenario, scenario.mixed, learned=True)
    rows.append(("mixed", mixed_s, mixed_s))
    progress(len(rows), total, "mixed")
    mapped_s, _ = _cluster_s(scenario, scenario.by_hand())
    rows.append(("mapped", mapped_s, mapped_s))
    progress(len(rows), total, "mapped")
    figures["learned_vs_mapped"] = mapped_s / mixed_s
    for name, cluster in scenario.alone.items():
        alone_s, _ = _cluster_s(scenario, cluster)
        figures[f"mixed_vs_{name}"] = alone_s / mixed_s
        figures[f"mapped_vs_{name}"] = alone_s / mapped_s
        rows.append((name, alone_s, alone_s))
        progress(len(rows), total, name)
    return RunResult(
        figures=figures,
        tables={"phases": Table(("what", "compute_s", "bandwidth_s"), rows)},
        plots={"affinity": Plot("Where the choice of GPU turns", lambda figure: _curve(figure, scenario, ratios))},
        notes=(
            f"{_cost(scenario.compute)} against {_cost(scenario.bandwidth)} US dollars an hour",
            f"learned: {plans[-1] if plans else 'no plan yet'}",
        ),
    )


def crossing(prompts: Sequence[int], ratios: Sequence[float]) -> float:
    """The prompt length at which the ratio passes 1, straight between two points; infinity where it does not."""
    for (low, before), (high, after) in zip(zip(prompts, ratios, strict=True), list(zip(prompts, ratios, strict=True))[1:], strict=False):
        if before > 1 >= after:
            return low + (high - low) * (before - 1) / (before - after)
    return 0.0 if ratios[0] <= 1 else float("inf")


def _single(prompt: int, sampled: int) -> TaskSpec:
    return TaskSpec(
        name=f"prompt_{prompt}",
        turns=Constant(value=1),
        prompt_tokens=Constant(value=prompt),
        observation_tokens=Constant(value=1),
        action_tokens=Constant(value=sampled),
        max_context=1 << 20,
    )


def _on_both(scenario: Affinity, task: TaskSpec) -> tuple[float, float]:
    episodes = [episode(task, scenario.seed, f"t{number}") for number in range(scenario.trajectories)]
    compute, bandwidth = (BatchRun((pool,)).trajectories(episodes).seconds for pool in (scenario.compute, scenario.bandwidth))
    return compute, bandwidth


def _cluster_s(scenario: Affinity, cluster: Cluster, *, learned: bool = False) -> tuple[float, list[str]]:
    """Seconds per counted rollout of the tasks' mixture, in the steady state; and the plans, in words."""
    last = scenario.warmup + scenario.counted
    episodes: list[Episode] = []
    for number in range(last + scenario.concurrency):
        task = task_of(scenario.tasks, scenario.seed, f"t{number}")
        episodes.append(episode(task, scenario.seed, f"t{number}"))
    run = BatchRun(cluster.pools, learned=learned)
    ended, began_s = 0, 0.0

    def over(_: int) -> bool:
        nonlocal ended, began_s
        ended += 1
        if ended == scenario.warmup:
            began_s = run.timeline.now
        if run.affinity is not None and ended % scenario.batch == 0:
            run.affinity.replan()
        return ended == last

    done = run.trajectories(episodes, concurrency=scenario.concurrency, over=over)
    plans = [plan.why for plan in run.affinity.plans] if run.affinity is not None else []
    return (done.seconds - began_s) / scenario.counted, plans


def _cost(pool: PoolSpec) -> str:
    gpu: GpuSpec = pool.engine.gpu
    return f"{pool.count} x {gpu.name} at {pool.count * (gpu.usd_per_hour or 0):.2f}"


def _curve(figure: Any, scenario: Affinity, ratios: Sequence[float]) -> None:
    axes = figure.subplots()
    axes.plot(scenario.crossover.prompts, ratios, "o-")
    axes.axhline(1, color="0.4", linestyle=":")
    axes.set_xscale("log", base=2)
    axes.set_xlabel(f"prompt, tokens, before {scenario.crossover.sampled} sampled ones")
    axes.set_ylabel(f"time on {scenario.compute.name} / {scenario.bandwidth.name}")


KIND = ScenarioKind(Affinity, run)
