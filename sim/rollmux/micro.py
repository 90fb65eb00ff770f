"""RollMux, micro-benchmarks: two or three jobs that the planner puts on shared nodes, against nodes of their own."""

import math
from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import Any

from pydantic import Field

from rubato.planning.coexecution import CoexecutionGroup, JobProfile, SharedCluster, admit, phased, place
from rubato.planning.round_robin import meta_iteration_s
from rubato.runtime.config import Section
from rubato.sim.outcome import Cell, Plot, RunProgress, RunResult, Table
from rubato.sim.rollmux.multiplexed import JobSize, PoolsSpec, certain_rates
from rubato.sim.rollmux.tails import TailsSpec, tail_named, tails_of
from rubato.sim.scenario import Scenario, ScenarioKind


class MicroJob(Section):
    """A job of the paper's Table 3; seconds alone."""

    size: JobSize
    rollout_s: float = Field(gt=0)
    train_s: float = Field(gt=0)
    tail: str = ""
    """Of `tails.curves`."""


class MicroCase(Section):
    """Jobs by name, in the order in which they arrive."""

    name: str
    jobs: tuple[str, ...] = Field(min_length=1)
    slo: float = Field(ge=1)
    rollout_nodes: int
    """As published."""
    train_nodes: int


class Micro(Scenario):
    """Each case by the planner and its round-robin."""

    pools: PoolsSpec
    tails: TailsSpec | None = None
    jobs: dict[str, MicroJob] = Field(min_length=1)
    cases: tuple[MicroCase, ...] = Field(min_length=1)


def run(scenario: Micro, progress: RunProgress) -> RunResult:
    cluster = scenario.pools.cluster()
    figures: dict[str, float | bool] = {}
    rows: list[tuple[Cell, ...]] = []
    for case in scenario.cases:
        groups = placed(profiles(scenario, case), cluster)
        slowdown = {name: value for group in groups for name, value in certain_rates(cluster)(group).items()}
        ratio = cost_ratio(groups, cluster)
        throughput = fmean(1 / value for value in slowdown.values())
        nodes = [(len(group.nodes), group.train_nodes) for group in groups]
        figures |= {
            f"{case.name}_cost_ratio": ratio,
            f"{case.name}_efficiency": ratio * throughput,
            f"{case.name}_as_published": nodes == [(case.rollout_nodes, case.train_nodes)],
            f"{case.name}_rollout_load": max(_rollout_load(group) for group in groups),
            f"{case.name}_meta_iteration_s": max(_meta_iteration_s(group, cluster) for group in groups),
        }
        rows += [(case.name, name, value, ratio, throughput, ratio * throughput) for name, value in slowdown.items()]
        progress(len(figures), 5 * len(scenario.cases), case.name)
    columns = ("case", "job", "slowdown", "cost_ratio", "throughput", "efficiency")
    return RunResult(
        figures=figures,
        tables={"phases": Table(columns, rows)},
        plots={"cost": Plot("Cost efficiency", lambda figure: _bars(figure, rows))},
        notes=("without `tails` a rollout has its nodes until its last response",) if scenario.tails is None else (),
    )


def profiles(scenario: Micro, case: MicroCase) -> list[JobProfile]:
    """The jobs of `case`, as planners have them."""
    tails = tails_of(scenario.tails, scenario.seed)
    jobs = [(f"{name}-{number}", name, scenario.jobs[name]) for number, name in enumerate(case.jobs, 1)]
    return [
        JobProfile(
            name, job.rollout_s, job.train_s, job.size.nodes, job.size.nodes, job.size.rollout_bytes, job.size.train_bytes,
            case.slo, tail=tail_named(tails, job.tail, f"jobs.{kind}"),
        )
        for name, kind, job in jobs
    ]  # fmt: skip


def placed(jobs: Iterable[JobProfile], cluster: SharedCluster) -> tuple[CoexecutionGroup, ...]:
    """Where they are once all have come."""
    groups: tuple[CoexecutionGroup, ...] = ()
    for job in jobs:
        groups = admit(groups, job, place(job, groups, cluster))
    return groups


def cost_ratio(groups: Sequence[CoexecutionGroup], cluster: SharedCluster) -> float:
    """What nodes of their own would cost all jobs of `groups`, over what those cost."""
    jobs = [pinned.job for group in groups for pinned in group.jobs]
    solo = [CoexecutionGroup(0, tuple(range(job.rollout_nodes)), job.train_nodes, ()) for job in jobs]
    return sum(group.usd_hour(cluster) for group in solo) / sum(group.usd_hour(cluster) for group in groups)


def _rollout_load(group: CoexecutionGroup) -> float:
    """Load of the busiest rollout node if no job were slowed, over the time that there is; of tails what they keep of it."""
    return max(
        math.fsum(p.job.tail.held * p.job.rollout_s / sum(p.job.longest) for p in group.jobs if node in p.nodes) for node in group.nodes
    )


def _meta_iteration_s(group: CoexecutionGroup, cluster: SharedCluster) -> float:
    return meta_iteration_s([phased(pinned, group, [pinned.job.longest], cluster) for pinned in group.jobs])


def _bars(figure: Any, rows: Sequence[tuple[Cell, ...]]) -> None:
    axes = figure.subplots()
    cases = {row[0]: row[5] for row in rows}
    axes.bar(list(cases), list(cases.values()))
    axes.set_ylabel("cost efficiency over solo")


KIND = ScenarioKind(Micro, run)
