"""RollArt, R4: throughput of a whole job while the staleness bound grows; the live planners admit, route and hand over.

Stragglers are waited for, or dropped as RollArt does; whom either leaves out stands beside it.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise, product
from statistics import fmean
from typing import Any, Literal, NamedTuple, Self

from pydantic import Field, NonNegativeInt, model_validator

from rubato.planning.advice import advise
from rubato.sim.advice import view_of
from rubato.sim.cluster import ClusterJobSpec, cluster_job
from rubato.sim.job import Job, JobStep
from rubato.sim.outcome import Cell, LaneSpan, Plot, RunProgress, RunResult, Table
from rubato.sim.scenario import Scenario, ScenarioKind

Rule = Literal["wait", "drop"]


class Staleness(Scenario):
    """One job, run once per bound and rule."""

    job: ClusterJobSpec
    alphas: tuple[NonNegativeInt, ...] = Field(min_length=1)
    """Rising; throughput is relative to the first."""
    stragglers: tuple[Rule, ...] = Field(default=("wait", "drop"), min_length=1)
    """As the live `staleness.stragglers`; drop is RollArt's."""
    warmup_steps: int = Field(ge=1)
    """Steps before throughput counts: the first ones fill the buffer."""
    counted_steps: int = Field(ge=1)
    """Steps whose throughput counts, in the middle of the job."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.warmup_steps + self.counted_steps > self.job.steps:
            raise ValueError("job.steps must be at least warmup_steps and counted_steps together")
        return self


COLUMNS = (
    "stragglers", "alpha", "steps_per_hour", "tokens_per_s", "waited_share", "age_mean", "age_max", "scored", "stale", "cancelled", "length_bias"
)  # fmt: skip


class Played(NamedTuple):
    """One job, as COLUMNS name it; `tokens_per_s` are trained ones. `length_bias`: mean sampled tokens of what was trained over that of what
    was begun; 1 is no selection."""

    stragglers: str
    alpha: int
    steps_per_hour: float
    tokens_per_s: float
    waited_share: float
    age_mean: float
    age_max: int
    scored: int
    stale: int
    cancelled: int
    length_bias: float


def run(scenario: Staleness, progress: RunProgress) -> RunResult:
    rows: list[Played] = []
    steps: list[tuple[Cell, ...]] = []
    tasks: list[tuple[Cell, ...]] = []
    spans: list[LaneSpan] = []
    notes: list[str] = []
    for rule, alpha in product(scenario.stragglers, scenario.alphas):
        spec = scenario.job.model_copy(update={"alpha": alpha, "stragglers": rule})
        job = cluster_job(spec, scenario.seed)
        job.run(scenario.warmup_steps + scenario.counted_steps)
        rows.append(_played(scenario, rule, alpha, job))
        tasks += _by_task(rule, alpha, job)
        notes.append(f"advice at a bound of {alpha}, {rule}: {advise(view_of(spec, job, scenario.warmup_steps)).why}")
        for row in job.rows:
            steps.append((rule, alpha, row.step, row.claimed_s, row.waited_s, row.train_s, row.published_s, row.tokens))
            spans += _spans(f"{rule}, alpha {alpha}", row)
        progress(len(rows), len(scenario.stragglers) * len(scenario.alphas), f"{rule}, alpha {alpha}")
    return RunResult(
        figures=_figures(scenario, rows),
        tables={
            "phases": Table(("stragglers", "alpha", "step", "claimed_s", "waited_s", "train_s", "published_s", "tokens"), steps),
            "staleness": Table(COLUMNS, rows),
            "tasks": Table(("stragglers", "alpha", "task", "begun", "trained", "dropped", "trained_share"), tasks),
        },
        plots={"staleness": Plot("Throughput by staleness bound", lambda figure: _curve(figure, rows))},
        spans=spans,
        notes=notes,
    )


def _figures(scenario: Staleness, rows: Sequence[Played]) -> dict[str, float | bool]:
    """Of each rule by its name; of `drop` over `wait` at the first bound, where both are played."""
    found: dict[str, float | bool] = {"bound_kept": all(row.age_max <= row.alpha for row in rows)}
    for rule in scenario.stragglers:
        own = [row for row in rows if row.stragglers == rule]
        rates = [row.steps_per_hour / own[0].steps_per_hour for row in own]
        found |= {f"throughput_{rule}_alpha_{row.alpha}": rate for row, rate in zip(own[1:], rates[1:], strict=True)}
        found |= {f"length_bias_{rule}_alpha_{row.alpha}": row.length_bias for row in own}
        found[f"throughput_most_{rule}"] = max(rates)
        found[f"throughput_never_falls_{rule}"] = all(a <= b * 1.01 for a, b in pairwise(rates))
    by_rule = {(row.stragglers, row.alpha): row for row in rows}
    for alpha in scenario.alphas if {"wait", "drop"} <= set(scenario.stragglers) else ():
        wait, drop = by_rule["wait", alpha], by_rule["drop", alpha]
        found[f"drop_over_wait_steps_alpha_{alpha}"] = drop.steps_per_hour / wait.steps_per_hour
        found[f"drop_over_wait_tokens_alpha_{alpha}"] = drop.tokens_per_s / wait.tokens_per_s
    return found


def _played(scenario: Staleness, rule: str, alpha: int, job: Job) -> Played:
    counted = job.rows[scenario.warmup_steps :]
    seconds = counted[-1].published_s - job.rows[scenario.warmup_steps - 1].published_s
    ages, fates, trained = job.buffer.ages, job.buffer.fates, job.buffer.trained_names
    return Played(
        rule,
        alpha,
        3600 * len(counted) / seconds,
        sum(row.tokens for row in counted) / seconds,
        sum(row.waited_s for row in counted) / seconds,
        sum(ages) / len(ages),
        max(ages),
        fates["scored"],
        fates.get("stale", 0),
        fates.get("cancelled", 0),
        fmean(job.begun[name].sampled for name in trained) / fmean(each.sampled for each in job.begun.values()),
    )


def _by_task(rule: str, alpha: int, job: Job) -> Iterator[tuple[Cell, ...]]:
    """Of each task: rollouts that were begun, trained and dropped, and the share of the latter two that trained."""
    trained = Counter(job.begun[name].task for name in job.buffer.trained_names)
    all_trained = set(job.buffer.trained_names)
    gone = (each.task for name, each in job.begun.items() if name not in all_trained and not job.buffer.may_train(name))
    dropped = Counter(gone)
    for task, begun in sorted(Counter(each.task for each in job.begun.values()).items()):
        over = trained[task] + dropped[task]
        yield rule, alpha, task, begun, trained[task], dropped[task], trained[task] / over if over else 0.0


def _spans(process: str, row: JobStep) -> list[LaneSpan]:
    lane = "trainer"
    return [
        LaneSpan(process, lane, f"wait {row.step}", row.asked_s, row.waited_s),
        LaneSpan(process, lane, f"train {row.step}", row.claimed_s, row.train_s),
        LaneSpan(process, lane, f"publish {row.step}", row.trained_s, row.published_s - row.trained_s),
    ]


def _curve(figure: Any, rows: Sequence[Played]) -> None:
    axes = figure.subplots()
    for rule in dict.fromkeys(row.stragglers for row in rows):
        own = [row for row in rows if row.stragglers == rule]
        axes.plot([row.alpha for row in own], [row.steps_per_hour / own[0].steps_per_hour for row in own], "o-", label=rule)
    axes.axhline(1.22, color="0.4", linestyle=":", label="the paper's most")
    axes.set_xlabel("staleness bound, versions")
    axes.set_ylabel("throughput relative to the first")
    axes.legend()


KIND = ScenarioKind(Staleness, run)
