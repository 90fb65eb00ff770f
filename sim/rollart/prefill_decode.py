"""RollArt, prefill apart from decode: what it gives over engines that do both, by hand-made splits, and what the planner makes of a load that changes."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Self

from pydantic import Field, PositiveInt, model_validator

from rubato.planning.roofline import Deployment
from rubato.runtime.config import Section
from rubato.sim.cluster import PoolSpec
from rubato.sim.disaggregated import DisaggregatedProxy
from rubato.sim.outcome import Cell, Plot, RunProgress, RunResult, Table
from rubato.sim.rollart.batch import BatchRun
from rubato.sim.scenario import Scenario, ScenarioKind
from rubato.sim.workload import Episode, TaskSpec, episode, task_of


class Nodes(Section):
    """What each node holds, for one model."""

    name: str
    prefill: Deployment
    decode: Deployment


class Flip(Section):
    """Equal engines, and a load that changes its nature half-way."""

    engine: Deployment
    engines: int = Field(ge=2)
    first: TaskSpec
    then: TaskSpec
    concurrency: int = Field(ge=1)
    rollouts: int = Field(ge=2)


class PrefillDecode(Scenario):
    """xPyD: x nodes prefill and y nodes decode; both together are held against the same nodes that do both."""

    models: tuple[Nodes, ...] = Field(min_length=1)
    nodes: int = Field(ge=2)
    prefill_nodes: tuple[PositiveInt, ...] = Field(min_length=1)
    """Each a number of the nodes, fewer than all."""
    tasks: tuple[TaskSpec, ...] = Field(min_length=1)
    concurrency: int = Field(ge=1)
    """Rollouts at once."""
    counted: int = Field(ge=1)
    """Rollouts after which the time is read, while others still run."""
    flip: Flip

    @model_validator(mode="after")
    def _check(self) -> Self:
        if max(self.prefill_nodes) >= self.nodes:
            raise ValueError("each of prefill_nodes must be fewer than nodes: some nodes have to decode")
        return self


def run(scenario: PrefillDecode, progress: RunProgress) -> RunResult:
    episodes = _mixture(scenario)
    rows: list[tuple[Cell, ...]] = []
    figures: dict[str, float | bool] = {}
    total = len(scenario.models) * len(scenario.prefill_nodes) + 1
    for model in scenario.models:
        gains: dict[int, float] = {}
        for num in scenario.prefill_nodes:
            pools = _pools(model, num, scenario.nodes)
            both_s, apart_s = _seconds(scenario, pools, episodes, 0), _seconds(scenario, pools, episodes, num)
            gains[num] = both_s / apart_s
            split = f"{num}P{scenario.nodes - num}D"
            figures[f"{model.name}_{split}"] = gains[num]
            rows.append((model.name, split, both_s, apart_s))
            progress(len(rows), total, f"{model.name} {split}")
        figures[f"{model.name}_most_prefill_is_worst"] = min(gains, key=gains.__getitem__) == max(gains)
    changes = _flip(scenario, figures, rows)
    progress(total, total, "flip")
    return RunResult(
        figures=figures,
        tables={"splits": Table(("model", "split", "both_s", "apart_s"), rows)},
        plots={"splits": Plot("Prefill apart from decode", lambda figure: _bars(figure, figures))},
        notes=tuple(f"{at:.0f} s: {why}" for at, why in changes),
    )


def _mixture(scenario: PrefillDecode) -> list[Episode]:
    names = [f"t{number}" for number in range(scenario.counted + scenario.concurrency)]
    return [episode(task_of(scenario.tasks, scenario.seed, name), scenario.seed, name) for name in names]


def _pools(model: Nodes, num_prefill: int, nodes: int) -> tuple[PoolSpec, ...]:
    return (
        PoolSpec(name="prefill", engine=model.prefill, count=num_prefill),
        PoolSpec(name="decode", engine=model.decode, count=nodes - num_prefill),
    )


def _seconds(scenario: PrefillDecode, pools: tuple[PoolSpec, ...], episodes: Sequence[Episode], apart: int) -> float:
    """Until the counted rollouts are done; `apart` engines prefill, 0 where all do both."""
    batch = BatchRun(pools)
    if apart:
        batch.manager = replace(batch.manager, proxy=DisaggregatedProxy(batch.timeline, batch.engines, apart))
    return batch.trajectories(episodes, enough=scenario.counted, concurrency=scenario.concurrency).seconds


def _flip(scenario: PrefillDecode, figures: dict[str, float | bool], rows: list[tuple[Cell, ...]]) -> list[tuple[float, str]]:
    """The load's first half is of one task, its second of another; every fixed split and the planner play all of it."""
    flip = scenario.flip
    half = flip.rollouts // 2
    episodes = [episode(flip.first if number < half else flip.then, scenario.seed, f"f{number}") for number in range(flip.rollouts)]
    pools = (PoolSpec(name="engine", engine=flip.engine, count=flip.engines),)
    seconds: dict[str, float] = {}
    changes: list[tuple[float, str]] = []
    for num in (*range(1, flip.engines), 0):
        batch = BatchRun(pools)
        proxy = DisaggregatedProxy(batch.timeline, batch.engines, num or flip.engines // 2, auto=not num)
        batch.manager = replace(batch.manager, proxy=proxy)
        name = f"{num}P{flip.engines - num}D" if num else "auto"
        seconds[name] = batch.trajectories(episodes, concurrency=flip.concurrency).seconds
        rows.append(("flip", name, 0.0, seconds[name]))
        changes = proxy.changes
    auto_s = seconds.pop("auto")
    figures["auto_over_best_fixed"] = min(seconds.values()) / auto_s
    return changes


def _bars(figure: Any, figures: dict[str, float | bool]) -> None:
    shown = {name: value for name, value in figures.items() if not isinstance(value, bool)}
    axes = figure.subplots()
    axes.barh(list(shown), list(shown.values()))
    axes.axvline(1, color="0.4", linestyle=":")
    axes.set_xlabel("throughput relative to engines that do both; of auto to the best fixed split")


KIND = ScenarioKind(PrefillDecode, run)
