"""RollMux, Figure 13: two weeks of production jobs. The list is not published: jobs are made so that, each alone, they hold the nodes of the digitised curve."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from random import Random
from statistics import fmean
from typing import Any, Self

from pydantic import Field, model_validator

from rubato.planning.coexecution import JobProfile
from rubato.planning.consolidation import RolloutTail
from rubato.runtime.config import Section
from rubato.sim.distribution import Uniform
from rubato.sim.outcome import Cell, Plot, RunProgress, RunResult, Table
from rubato.sim.rollmux.multiplexed import HOUR_S, Arrival, JobSize, MultiplexedRun, PoolsSpec, node_usd_hour
from rubato.sim.rollmux.policies import Alone, Planned, Regrouped
from rubato.sim.rollmux.tails import TailsSpec, tail_named, tails_of
from rubato.sim.scenario import Scenario, ScenarioKind


class HeldNodes(Section):
    """(hour, nodes of each pool that jobs hold from then on); none at the end."""

    points: tuple[tuple[float, int], ...] = Field(min_length=2)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.points[-1][1] or any(a[0] > b[0] for a, b in pairwise(self.points)):
            raise ValueError("points must be in order of time and end with no node")
        return self


class ProductionJob(Section):
    """One of the paper's Figure 2; seconds alone."""

    size: JobSize
    rollout_s: float = Field(gt=0)
    train_s: float = Field(gt=0)
    tail: str = ""
    """Of `tails.curves`."""


class ProductionTrace(Scenario):
    """The same jobs alone and shared."""

    pools: PoolsSpec
    tails: TailsSpec | None = None
    held: HeldNodes
    jobs: int = Field(ge=1)
    """How many there are: where the curve rises by two or more, so many pairs of nodes are of one larger job as bring their number to this."""
    shapes: dict[str, ProductionJob] = Field(min_length=1)
    slo: Uniform


def run(scenario: ProductionTrace, progress: RunProgress) -> RunResult:
    cluster = scenario.pools.cluster()
    jobs = made(scenario)
    rows: list[tuple[Cell, ...]] = []
    figures: dict[str, float | bool] = {"jobs": float(len(jobs))}
    figures["mean_hours"] = fmean(job.work_s for job in jobs) / HOUR_S
    alone = MultiplexedRun(jobs, Alone(cluster), cluster).run()
    # The paper's own curves: veRL holds as many H800 nodes as Solo-D, for as long, and no H20.
    verl = alone.usd * cluster.train.usd_hour / (cluster.train.usd_hour + node_usd_hour(scenario.pools.rollout))
    for name, policy in (("rollmux", Planned(cluster)), ("regrouped", Regrouped(cluster))):
        progress(len(rows), 2, name)
        found = MultiplexedRun(jobs, policy, cluster).run()
        gpus = scenario.pools.rollout.gpus_per_server
        slowdown = fmean(found.slowdown.values())
        own = (
            alone.usd_hour / found.usd_hour, verl / alone.usd * alone.usd_hour / found.usd_hour, alone.usd / found.usd, verl / found.usd,
            found.attained, gpus * found.rollout_nodes, gpus * found.train_nodes,
        )  # fmt: skip
        names = ("solo_over", "verl_over", "solo_over_in_all", "verl_over_in_all", "attained", "rollout_gpus", "train_gpus")
        figures |= {f"{name}_{what}": value for what, value in zip(names, own, strict=True)}
        rows.append((name, found.usd_hour, found.peak_usd_hour, slowdown, *own))
    rows.append(("alone", alone.usd_hour, alone.peak_usd_hour, 1.0, *([1.0, verl / alone.usd] * 2), alone.attained, 0.0, 0.0))
    columns = ("system", "usd_hour", "peak_usd_hour", "slowdown", *names)
    return RunResult(
        figures=figures,
        tables={"cost": Table(columns, rows)},
        plots={"cost": Plot("Two weeks", lambda figure: _bars(figure, rows))},
        notes=(
            "the job list is made: arrivals and departures follow the digitised curve of the nodes that Solo-D holds; which job "
            "ends, its phases and its SLO are drawn",
        ),
    )


def made(scenario: ProductionTrace) -> list[Arrival]:
    """In order of arrival. Where the curve falls, jobs that run end, drawn by lot."""
    chance = Random(scenario.seed)
    rises = _rises(scenario, chance)
    begun: list[tuple[float, float, int]] = []
    running: list[tuple[float, int]] = []
    for at, (hour, nodes) in enumerate(scenario.held.points):
        running += [(hour, num) for num in rises[at]]
        while (gone := sum(num for _, num in running) - nodes) > 0:
            job = chance.choice([job for job in running if job[1] <= gone] or running)
            running.remove(job)
            begun.append((job[0], hour, job[1]))
    tails = tails_of(scenario.tails, scenario.seed)
    return [_arrival(scenario, f"job-{at}", *job, chance, tails) for at, job in enumerate(sorted(begun))]


def _rises(scenario: ProductionTrace, chance: Random) -> list[list[int]]:
    """At each point, the nodes of each job that arrives."""
    levels = [0, *(nodes for _, nodes in scenario.held.points)]
    rises = [max(0, after - before) for before, after in pairwise(levels)]
    larger = sum(rises) - scenario.jobs
    double = [at for at, rise in enumerate(rises) for _ in range(rise // 2)]
    if not 0 <= larger <= len(double):
        raise ValueError(f"the curve has room for {sum(rises) - len(double)} to {sum(rises)} jobs, not for {scenario.jobs}")
    chosen = chance.sample(double, larger)
    return [[2] * chosen.count(at) + [1] * (rise - 2 * chosen.count(at)) for at, rise in enumerate(rises)]


def _arrival(
    scenario: ProductionTrace, name: str, begins: float, ends: float, nodes: int, chance: Random, tails: Mapping[str, RolloutTail]
) -> Arrival:
    kinds = [kind for kind, shape in scenario.shapes.items() if shape.size.nodes == nodes]
    kind = chance.choice(kinds)
    shape = scenario.shapes[kind]
    job = JobProfile(
        name, shape.rollout_s, shape.train_s, nodes, nodes, shape.size.rollout_bytes, shape.size.train_bytes,
        scenario.slo.draw(chance), cold_s=shape.size.cold_s, tail=tail_named(tails, shape.tail, f"shapes.{kind}"),
    )  # fmt: skip
    return Arrival(begins * HOUR_S, max(ends - begins, 0.1) * HOUR_S, job)


def _bars(figure: Any, rows: Sequence[tuple[Cell, ...]]) -> None:
    axes = figure.subplots()
    axes.bar([row[0] for row in rows], [row[1] for row in rows])
    axes.set_ylabel("$ per hour")


KIND = ScenarioKind(ProductionTrace, run)
