"""RollArt, R4: throughput of a whole job while the staleness bound grows; the live planners admit, route and hand over."""

from itertools import pairwise
from typing import Any, Self

from pydantic import Field, NonNegativeInt, model_validator

from rubato.planning.advice import advise
from rubato.sim.advice import view_of
from rubato.sim.cluster import ClusterJobSpec, cluster_job
from rubato.sim.job import JobStep
from rubato.sim.outcome import Cell, LaneSpan, Plot, RunProgress, RunResult, Table
from rubato.sim.scenario import Scenario, ScenarioKind


class Staleness(Scenario):
    """One job, run once per bound."""

    job: ClusterJobSpec
    alphas: tuple[NonNegativeInt, ...] = Field(min_length=1)
    """Rising; throughput is relative to the first."""
    warmup_steps: int = Field(ge=1)
    """Steps before throughput counts: the first ones fill the buffer."""
    counted_steps: int = Field(ge=1)
    """Steps whose throughput counts, in the middle of the job."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.warmup_steps + self.counted_steps > self.job.steps:
            raise ValueError("job.steps must be at least warmup_steps and counted_steps together")
        return self


def run(scenario: Staleness, progress: RunProgress) -> RunResult:
    rows: list[tuple[Cell, ...]] = []
    steps: list[tuple[Cell, ...]] = []
    spans: list[LaneSpan] = []
    notes: list[str] = []
    for alpha in scenario.alphas:
        spec = scenario.job.model_copy(update={"alpha": alpha})
        job = cluster_job(spec, scenario.seed)
        job.run(scenario.warmup_steps + scenario.counted_steps)
        counted = job.rows[scenario.warmup_steps :]
        seconds = counted[-1].published_s - job.rows[scenario.warmup_steps - 1].published_s
        per_hour = 3600 * len(counted) / seconds
        waited = sum(row.waited_s for row in counted) / seconds
        ages = job.buffer.ages
        fates = job.buffer.fates
        rows.append((alpha, per_hour, waited, sum(ages) / len(ages), max(ages), fates.get("stale", 0), fates["scored"]))
        notes.append(f"advice at a bound of {alpha}: {advise(view_of(spec, job, scenario.warmup_steps)).why}")
        for row in job.rows:
            steps.append((alpha, row.step, row.claimed_s, row.waited_s, row.train_s, row.published_s, row.tokens))
            spans += _spans(alpha, row)
        progress(len(rows), len(scenario.alphas), f"alpha {alpha}")
    first = float(rows[0][1])
    figures: dict[str, float | bool] = {f"throughput_alpha_{row[0]}": float(row[1]) / first for row in rows[1:]}
    figures["throughput_most"] = max(float(row[1]) / first for row in rows)
    figures["throughput_never_falls"] = all(a[1] <= b[1] * 1.01 for a, b in pairwise(rows))  # type: ignore[operator]
    figures["bound_kept"] = all(row[4] <= row[0] for row in rows)  # type: ignore[operator]
    columns = ("alpha", "steps_per_hour", "waited_share", "age_mean", "age_max", "stale", "scored")
    return RunResult(
        figures=figures,
        tables={
            "phases": Table(("alpha", "step", "claimed_s", "waited_s", "train_s", "published_s", "tokens"), steps),
            "staleness": Table(columns, rows),
        },
        plots={"staleness": Plot("Throughput by staleness bound", lambda figure: _curve(figure, rows))},
        spans=spans,
        notes=notes,
    )


def _spans(alpha: int, row: JobStep) -> list[LaneSpan]:
    process, lane = f"alpha {alpha}", "trainer"
    return [
        LaneSpan(process, lane, f"wait {row.step}", row.asked_s, row.waited_s),
        LaneSpan(process, lane, f"train {row.step}", row.claimed_s, row.train_s),
        LaneSpan(process, lane, f"publish {row.step}", row.trained_s, row.published_s - row.trained_s),
    ]


def _curve(figure: Any, rows: list[tuple[Cell, ...]]) -> None:
    axes = figure.subplots()
    axes.plot([row[0] for row in rows], [float(row[1]) / float(rows[0][1]) for row in rows], "o-", label="ours")
    axes.axhline(1.22, color="0.4", linestyle=":", label="the paper's most")
    axes.set_xlabel("staleness bound, versions")
    axes.set_ylabel("throughput relative to the first")
    axes.legend()


KIND = ScenarioKind(Staleness, run)
