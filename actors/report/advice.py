"""What the rows of metrics.jsonl say to the planner of advice, and how its advice stands in them."""

from collections.abc import Iterator, Sequence
from itertools import islice
from statistics import fmean

from rubato.planning.advice import Advice, AdviceView, advise

STEPS_SEEN = 10
"""Newest steps that advice is made from: enough to average over slow batches, few enough to follow the job."""

Row = dict[str, float]


def advice_of(rows: Sequence[Row], alpha: int) -> Advice | None:
    """By the newest of `rows`, of which the very first counts only where it is alone; None where they lack the figures.

    `alpha` is the config's, -1 where the job has no bound; rows have it where it adapts.
    """
    view = view_of(rows, alpha)
    return advise(view) if view else None


def advice_metrics(rows: Sequence[Row], alpha: int) -> Row:
    """`advice/<bound>/<change>`: the gain of each change that is worth a word; the most useful comes first."""
    advice = advice_of(rows, alpha)
    return {f"advice/{advice.bound}/{change.key}": change.gain for change in advice.changes} if advice else {}


def view_of(rows: Sequence[Row], alpha: int) -> AdviceView | None:
    """Means over the newest steps."""
    seen = [row for row in islice(reversed(rows), STEPS_SEEN) if row["step"] > 1 or len(rows) == 1]
    if not seen or any("rollout/wall_s_mean" not in row or row.get("time/step", 0.0) <= 0 for row in seen):
        return None
    newest = seen[0]
    engines, managers = (sum(name.startswith(f"idle/{role}-") for name in newest) for role in ("engine", "env_manager"))
    if not engines or not managers or not newest.get("rollout/room"):
        return None

    def mean(name: str) -> float:
        return fmean(row.get(name, 0.0) for row in seen)

    workers = int(newest.get("rollout/env_workers", 0.0))
    # A manager counts as busy while its workers are: there it says nothing of its own loop.
    idle = [] if workers else [value for row in seen for value in _idle(row, "env_manager")]
    return AdviceView(
        step_s=mean("time/step"),
        waited_s=min(mean("time/wait_for_batch"), mean("time/step")),
        train_s=mean("time/train"),
        alpha=int(newest.get("staleness/alpha", alpha)),
        batch=max(1, round(fmean(row["perf/samples_s"] * row["time/step"] for row in seen))),
        rollout_s=mean("rollout/wall_s_mean"),
        env_share=min(1.0, mean("rollout/env_frac")),
        reward_share=min(1.0, mean("rollout/reward_frac")),
        reward_workers=int(newest.get("rollout/reward_workers", 0.0)),
        reward_services=sum(name.startswith("idle/reward_service-") for name in newest),
        reward_each_s=newest.get("rollout/reward_each_s", 0.0),
        reward_alone_s=newest.get("rollout/reward_alone_s", 0.0),
        engines=engines,
        slots=int(newest.get("rollout/slots", 0.0)),
        managers=managers,
        room=int(newest["rollout/room"]),
        pause_s=mean("weights/pause_s"),
        env_workers=workers,
        manager_busy=1.0 - fmean(idle) if idle else 0.0,
        host_busy=_host_busy(seen),
    )


def _idle(row: Row, role: str) -> Iterator[float]:
    return (value for name, value in row.items() if name.startswith(f"idle/{role}-"))


def _host_busy(seen: Sequence[Row]) -> float:
    """Share of the cores in use between the oldest row and the newest; 0 where it is not known."""
    newest, oldest = seen[0], seen[-1]
    seconds = newest.get("time/unix_s", 0.0) - oldest.get("time/unix_s", 0.0)
    if seconds <= 0 or "cpu/host" not in oldest or not newest.get("cpu/cores"):
        return 0.0
    return min(1.0, max(0.0, newest.get("cpu/host", 0.0) - oldest["cpu/host"]) / seconds / newest["cpu/cores"])
