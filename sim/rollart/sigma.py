"""RollArt, R2: one batch in lock-step against trajectory by trajectory, while the spread of environment latencies grows."""

from itertools import pairwise
from typing import Any

from pydantic import Field, NonNegativeFloat

from rubato.sim.cluster import PoolSpec
from rubato.sim.distribution import Constant, Normal
from rubato.sim.outcome import Cell, Plot, RunProgress, RunResult, Table
from rubato.sim.rollart.batch import BatchRun
from rubato.sim.scenario import Scenario, ScenarioKind
from rubato.sim.workload import TaskSpec, episode


class Sigma(Scenario):
    """An environment's step takes N(mean_s, sigma)."""

    pools: tuple[PoolSpec, ...] = Field(min_length=1)
    tasks: tuple[TaskSpec, ...] = Field(min_length=1)
    """Each is a reading of what the paper does not say: whose steps they are."""
    trajectories: int = Field(ge=1)
    mean_s: float = Field(gt=0)
    sigmas_s: tuple[NonNegativeFloat, ...] = Field(min_length=1)
    """Rising."""


def run(scenario: Sigma, progress: RunProgress) -> RunResult:
    rows: list[tuple[Cell, ...]] = []
    figures: dict[str, float | bool] = {}
    cells = [(task, sigma) for task in scenario.tasks for sigma in scenario.sigmas_s]
    for task, sigma in cells:
        law = Normal(law="normal", mean=scenario.mean_s, sigma=sigma)
        slowed = task.model_copy(update={"step_s": law, "reset_s": Constant(value=0.0)})
        episodes = [episode(slowed, scenario.seed, f"t{number}") for number in range(scenario.trajectories)]
        locked = BatchRun(scenario.pools).lock_step(episodes).seconds
        free = BatchRun(scenario.pools).trajectories(episodes).seconds
        figures[f"{task.name}_sigma_{sigma:g}"] = locked / free
        rows.append((task.name, sigma, locked, free, locked / free))
        progress(len(rows), len(cells), f"{task.name}, sigma {sigma:g} s")
    for task in scenario.tasks:
        speedups = [figures[f"{task.name}_sigma_{sigma:g}"] for sigma in scenario.sigmas_s]
        figures[f"{task.name}_monotone"] = all(earlier < later for earlier, later in pairwise(speedups))
    return RunResult(
        figures=figures,
        tables={"phases": Table(("task", "sigma_s", "lock_step_s", "trajectory_s", "speedup"), rows)},
        plots={"sigma": Plot("Trajectory-level rollouts against lock-step", lambda figure: _curve(figure, rows))},
    )


def _curve(figure: Any, rows: list[tuple[Cell, ...]]) -> None:
    axes = figure.subplots()
    for task in dict.fromkeys(row[0] for row in rows):
        ours = [row for row in rows if row[0] == task]
        axes.plot([row[1] for row in ours], [row[4] for row in ours], "o-", label=task)
    axes.plot([1, 10], [1.23, 2.27], "s", color="0.4", label="paper")
    axes.set_xlabel("sigma of the environment's latency, s")
    axes.set_ylabel("speedup")
    axes.legend()


KIND = ScenarioKind(Sigma, run)
