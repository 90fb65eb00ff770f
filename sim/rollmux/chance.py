"""Jobs planned with the steps they were seen to take, and with every response at its limit: what both cost, and which bounds they keep."""

import math
from collections.abc import Mapping, Sequence
from random import Random
from statistics import fmean
from typing import Any, NamedTuple

from pydantic import Field

from rubato.planning.coexecution import CHANCE_WINDOW, CoexecutionGroup, SharedCluster, phased
from rubato.planning.round_robin import StepTimes, slowdowns
from rubato.sim.outcome import Cell, Plot, RunProgress, RunResult, Table
from rubato.sim.rollmux.multiplexed import Arrival, MultiplexedRun, PoolsSpec
from rubato.sim.rollmux.philly import PhillyJobs, TableRow, arrivals
from rubato.sim.rollmux.policies import Alone, Planned
from rubato.sim.rollpacker.rollout import LengthModel
from rubato.sim.scenario import Scenario, ScenarioKind

STEPS = 128
"""That the rates of a group are averaged over."""

BATCHES = 256
"""That are drawn of each law; a step is one of them."""


class Chance(Scenario):
    """The same jobs with each planner."""

    pools: PoolsSpec
    trace: PhillyJobs
    setting: TableRow
    lengths: dict[str, LengthModel] = Field(min_length=1)
    """A job has one of these, each as likely. Its durations in `trace` are those of every response at the limit."""
    responses: int = Field(ge=1)
    """Of a step: a rollout takes as long as the longest of them, an update as all their tokens."""
    seen: int = Field(ge=1)
    """Steps of a job that are known when it arrives."""
    epsilons: tuple[float, ...] = Field(min_length=1)
    """Of the planner by chance; figures carry the first one's."""


class StepShares(NamedTuple):
    """Shares of what a step takes with every response at the limit."""

    rollout: float
    train: float


class ActualSteps:
    """What jobs take in truth, which no planner is told but for the steps that it has seen."""

    def __init__(self, scenario: Chance, cluster: SharedCluster, jobs: Sequence[Arrival], laws: Mapping[str, Sequence[StepShares]]) -> None:
        self._seed = scenario.seed
        self._cluster = cluster
        self._batches = {each.job.name: laws[Random(f"{scenario.seed}/{each.job.name}").choice(sorted(laws))] for each in jobs}
        self.arrivals = [
            each._replace(job=each.job._replace(seen=self._steps(each.job.name, each.job.longest, scenario.seen, "seen"))) for each in jobs
        ]
        self.windows = self.kept = 0

    def rates(self, group: CoexecutionGroup) -> Mapping[str, float]:
        """Per job, its time in the group ÷ its time alone. Windows are counted, and those that keep the bound, step for step."""
        together = "/".join(pinned.job.name for pinned in group.jobs)
        steps = [self._steps(pinned.job.name, pinned.job.longest, STEPS, together) for pinned in group.jobs]
        jobs = [phased(pinned, group, own, self._cluster) for pinned, own in zip(group.jobs, steps, strict=True)]
        ratios = slowdowns(jobs, 0.0, STEPS, [math.inf] * len(jobs), window=CHANCE_WINDOW)
        assert ratios is not None  # no bound was given
        for pinned, own in zip(group.jobs, ratios, strict=True):
            self.windows += len(own)
            self.kept += sum(ratio <= pinned.job.slo * (1 + 1e-9) for ratio in own)
        return {pinned.job.name: fmean(own) for pinned, own in zip(group.jobs, ratios, strict=True)}

    def _steps(self, name: str, longest: StepTimes, num: int, what: str) -> tuple[StepTimes, ...]:
        drawn = Random(f"{self._seed}/{name}/{what}").choices(self._batches[name], k=num)
        return tuple(StepTimes(0.0, longest.rollout * b.rollout, longest.train * b.train) for b in drawn)


def _batches(law: LengthModel, responses: int, seed: str) -> list[StepShares]:
    chance = Random(seed)
    found: list[StepShares] = []
    for _ in range(BATCHES):
        tokens = [min(law.most, chance.choice(law.tasks).draw(chance)) for _ in range(responses)]
        found.append(StepShares(max(tokens) / law.most, fmean(tokens) / law.most))
    return found


def run(scenario: Chance, progress: RunProgress) -> RunResult:
    residents = scenario.setting.residents
    jobs = arrivals(scenario.trace, scenario.setting, scenario.seed)
    laws = {name: _batches(law, scenario.responses, f"{scenario.seed}/{name}") for name, law in scenario.lengths.items()}
    figures: dict[str, float | bool] = {}
    rows: list[tuple[Cell, ...]] = []
    worst = scenario.pools.cluster(residents)
    arms = [("alone", 0.0, Alone(worst)), ("worst_case", 0.0, Planned(worst))]
    arms += [("chance", epsilon, Planned(scenario.pools.cluster(residents, epsilon))) for epsilon in scenario.epsilons]
    for number, (name, epsilon, policy) in enumerate(arms):
        progress(number, len(arms), f"{name} {epsilon:g}")
        truth = ActualSteps(scenario, worst, jobs, laws)
        done = MultiplexedRun(truth.arrivals, policy, worst, truth.rates).run()
        slowdown = fmean(done.slowdown.values())
        kept = truth.kept / truth.windows
        limits = fmean(_within_limit(each, done.slowdown[each.job.name]) for each in truth.arrivals)
        rows.append((name, epsilon, done.usd, done.usd_hour, done.attained, kept, limits, slowdown))
        if name not in ("chance",) or epsilon == scenario.epsilons[0]:
            figures |= {f"{name}_usd": done.usd, f"{name}_attained": done.attained, f"{name}_windows_kept": kept}
            figures[f"{name}_attained_at_limit"] = limits
    figures["cost_over_worst_case"] = figures["chance_usd"] / figures["worst_case_usd"]
    figures["cost_over_alone"] = figures["chance_usd"] / figures["alone_usd"]
    columns = ("planner", "epsilon", "usd", "usd_hour", "attained", "windows_kept", "attained_at_limit", "slowdown")
    return RunResult(
        figures=figures,
        tables={"cost": Table(columns, rows)},
        plots={"cost": Plot("Planned by what was seen", lambda figure: _bars(figure, rows))},
        notes=("attained: jobs whose whole time kept their bound, against the same steps alone; windows of 16 steps likewise",),
    )


def _within_limit(arrival: Arrival, slowdown: float) -> bool:
    """Whether a job's time kept its bound against its longest steps."""
    alone = fmean(sum(step) for step in arrival.job.seen)
    return slowdown * alone <= arrival.job.slo * sum(arrival.job.longest)


def _bars(figure: Any, rows: Sequence[tuple[Cell, ...]]) -> None:
    axes = figure.subplots()
    axes.bar([f"{row[0]} {row[1]:g}" for row in rows], [row[2] for row in rows])
    axes.set_ylabel("$")


KIND = ScenarioKind(Chance, run)
