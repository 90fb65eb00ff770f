"""RollMux, section 7.4: 300 jobs come and go as in a segment of Microsoft's Philly trace, and are placed by several schedulers."""

from collections.abc import Mapping, Sequence
from random import Random
from statistics import fmean
from typing import Any, Literal

from pydantic import Field

from rubato.planning.coexecution import JobProfile
from rubato.runtime.config import Section
from rubato.sim.distribution import LogNormal, Uniform
from rubato.sim.outcome import Cell, Plot, RunProgress, RunResult, Table
from rubato.sim.rollmux.multiplexed import HOUR_S, Arrival, JobSize, Multiplexed, MultiplexedRun, PoolsSpec
from rubato.sim.rollmux.optimum import BlockSearch, Optimum
from rubato.sim.rollmux.policies import Alone, MostIdle, Planned, RandomGroup, Regrouped
from rubato.sim.scenario import Scenario, ScenarioKind

SizeName = Literal["small", "medium", "large"]


class PhaseLimits(Section):
    """Seconds, every response at its limit."""

    rollout_s: Uniform
    train_s: Uniform


class TableRow(Section):
    """One row of the paper's table."""

    name: str
    shapes: tuple[str, ...] = Field(min_length=1)
    """A job has one of these, each as likely."""
    slo: Uniform
    residents: int = Field(default=5, ge=1)
    jobs: int = Field(ge=1)
    """The first so many arrivals."""


class PhillyJobs(Section):
    """Jobs that come and go."""

    sizes: dict[SizeName, JobSize] = Field(min_length=1)
    """A job has one of these, each as likely."""
    shapes: dict[str, dict[SizeName, PhaseLimits]] = Field(min_length=1)
    hours: float = Field(gt=0)
    jobs: int = Field(ge=1)
    """They arrive within `hours`, at any time as likely."""
    work_hours: LogNormal
    """What a job takes alone."""


class Philly(Scenario):
    """Every setting with every scheduler."""

    pools: PoolsSpec
    trace: PhillyJobs
    settings: tuple[TableRow, ...] = Field(min_length=1)
    random_runs: int = Field(default=1, ge=1)
    """That the random scheduler is averaged over."""


def run(scenario: Philly, progress: RunProgress) -> RunResult:
    figures: dict[str, float | bool] = {}
    rows: list[tuple[Cell, ...]] = []
    # Settings of the same shapes and bounds have the same jobs.
    searches: dict[tuple[tuple[str, ...], float, float], BlockSearch] = {}
    for number, setting in enumerate(scenario.settings):
        progress(number, len(scenario.settings), setting.name)
        jobs = (setting.shapes, setting.slo.low, setting.slo.high)
        blocks = searches.setdefault(jobs, BlockSearch(scenario.pools.cluster(setting.residents)))
        optimum, found = _runs(scenario, setting, blocks)
        best = next(iter(found.values()))[0]
        for name, runs in found.items():
            ratio, attained = (fmean(values) for values in zip(*((m.usd / best.usd, m.attained) for m in runs), strict=True))
            slowdown = fmean(each for m in runs for each in m.slowdown.values())
            usd, peak = fmean(m.usd_hour for m in runs), max(m.peak_usd_hour for m in runs)
            rows.append((setting.name, name, ratio, attained, usd, peak, slowdown))
            figures |= {f"{setting.name}_{name}": ratio, f"{setting.name}_{name}_attained": attained}
        figures[f"{setting.name}_ordered"] = _rises([figures[f"{setting.name}_{n}"] for n in ("regrouped", "greedy", "random")])
        figures[f"{setting.name}_exact"] = fmean(each.exact for each in optimum.partitions)
    columns = ("setting", "scheduler", "cost_over_optimum", "attained", "usd_hour", "peak_usd_hour", "slowdown")
    return RunResult(
        figures=figures,
        tables={"cost": Table(columns, rows)},
        plots={"cost": Plot("Cost over the optimum", lambda figure: _bars(figure, rows))},
        notes=(
            "optimum: at every arrival and departure all running jobs are put together anew, for nothing; "
            f"{min(value for name, value in figures.items() if name.endswith('_exact')):.1%} of its partitions or more are exact, "
            "a lower bound stands for the rest",
            "a job has its steps to do, so one that is slowed pays for its nodes longer",
        ),
    )


def _runs(scenario: Philly, setting: TableRow, blocks: BlockSearch) -> tuple[Optimum, Mapping[str, Sequence[Multiplexed]]]:
    """By scheduler; the optimum first."""
    cluster = scenario.pools.cluster(setting.residents)
    jobs = arrivals(scenario.trace, setting, scenario.seed)
    optimum = Optimum(cluster, blocks)
    chances = [RandomGroup(cluster, scenario.seed + again) for again in range(scenario.random_runs)]
    found = {
        "optimum": (optimum,),
        "rollmux": (Planned(cluster),),
        "regrouped": (Regrouped(cluster),),
        "greedy": (MostIdle(cluster),),
        "random": chances,
        "alone": (Alone(cluster),),
    }
    return optimum, {name: [MultiplexedRun(jobs, each, cluster).run() for each in all_] for name, all_ in found.items()}


def arrivals(trace: PhillyJobs, setting: TableRow, seed: int) -> list[Arrival]:
    """The same times and work in every setting."""
    when, what = Random(f"{seed}/when"), Random(f"{seed}/{','.join(setting.shapes)}")
    times = sorted(when.uniform(0, trace.hours * HOUR_S) for _ in range(trace.jobs))
    work_s = [trace.work_hours.draw(when) * HOUR_S for _ in times]
    jobs = [_job(trace, setting, f"job-{at}", what) for at in range(len(times))]
    return [Arrival(*each) for each in zip(times, work_s, jobs, strict=True)][: setting.jobs]


def _job(trace: PhillyJobs, setting: TableRow, name: str, chance: Random) -> JobProfile:
    size_name = chance.choice(list(trace.sizes))
    size, phases = trace.sizes[size_name], trace.shapes[chance.choice(setting.shapes)][size_name]
    return JobProfile(
        name, phases.rollout_s.draw(chance), phases.train_s.draw(chance), size.nodes, size.nodes,
        size.rollout_bytes, size.train_bytes, setting.slo.draw(chance), cold_s=size.cold_s,
    )  # fmt: skip


def _rises(values: Sequence[float]) -> bool:
    return list(values) == sorted(values)


def _bars(figure: Any, rows: Sequence[tuple[Cell, ...]]) -> None:
    axes = figure.subplots()
    names = list(dict.fromkeys(row[1] for row in rows))[1:]
    settings = list(dict.fromkeys(row[0] for row in rows))
    for at, name in enumerate(names):
        own = [row[2] for row in rows if row[1] == name]
        axes.bar([place + at / (len(names) + 1) for place in range(len(own))], own, 1 / (len(names) + 1), label=name)
    axes.set_xticks(range(len(settings)), settings, fontsize=7)
    axes.axhline(1.0, color="0.5", linewidth=0.8)
    axes.set_ylabel("cost ÷ optimum")
    axes.legend(fontsize=7)


KIND = ScenarioKind(Philly, run)
