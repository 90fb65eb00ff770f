"""RollArt, R1: which GPU suits which task at equal cost, where the choice turns, and what a mixed cluster gains."""

from collections.abc import Sequence
from typing import Any

from pydantic import Field, PositiveInt

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
    """Its pools name their tasks."""
    alone: dict[str, Cluster]
    """Clusters of one kind of GPU that the mixed one is held against."""
    concurrency: int = Field(ge=1)
    """Rollouts at once, in the clusters."""
    counted: int = Field(ge=1)
    """Rollouts after which a cluster's time is read, while others still run."""


def run(scenario: Affinity, progress: RunProgress) -> RunResult:
    total = len(scenario.tasks) + len(scenario.crossover.prompts) + 1 + len(scenario.alone)
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
    mixed_s = _cluster_s(scenario, scenario.mixed)
    rows.append(("mixed", mixed_s, mixed_s))
    for name, cluster in scenario.alone.items():
        alone_s = _cluster_s(scenario, cluster)
        figures[f"mixed_vs_{name}"] = alone_s / mixed_s
        rows.append((name, alone_s, alone_s))
        progress(len(rows), total, name)
    return RunResult(
        figures=figures,
        tables={"phases": Table(("what", "compute_s", "bandwidth_s"), rows)},
        plots={"affinity": Plot("Where the choice of GPU turns", lambda figure: _curve(figure, scenario, ratios))},
        notes=(f"{_cost(scenario.compute)} against {_cost(scenario.bandwidth)} US dollars an hour",),
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


def _cluster_s(scenario: Affinity, cluster: Cluster) -> float:
    """Seconds per counted rollout of the tasks' mixture, in the steady state."""
    episodes: list[Episode] = []
    for number in range(scenario.counted + scenario.concurrency):
        task = task_of(scenario.tasks, scenario.seed, f"t{number}")
        episodes.append(episode(task, scenario.seed, f"t{number}"))
    done = BatchRun(cluster.pools).trajectories(episodes, enough=scenario.counted, concurrency=scenario.concurrency)
    return done.seconds / scenario.counted


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
