"""Draws report.png and prints the closing lines of a run: `python -m rubato.actors.report RUN_DIR`."""

import json
import os
import platform
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from itertools import groupby
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple

from rubato.actors.config import StalenessSection, TrainSection
from rubato.actors.engines.pace import MOST_OUTLASTED
from rubato.actors.report.advice import advice_of
from rubato.actors.samples.run_files import read_lines
from rubato.actors.training.checks import idle_cause, is_flat
from rubato.planning.staleness import UNBOUNDED
from rubato.runtime.config.source import fill_tree
from rubato.runtime.config.yaml_core import read_yaml

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Row = dict[str, float]

REWARD, EVAL, AGE, ALPHA, READY, BOUND = "#1f6f8b", "#d1495b", "#66a182", "#9a9a9a", "#edae49", "#8d6a9f"


class Run(NamedTuple):
    """What a finished run folder tells. `deaths` are (seconds on the rows' time axis, actor name)."""

    folder: Path
    rows: list[Row]
    fates: Counter[str]
    alpha: int
    steps: int
    model: str
    task: str
    deaths: list[tuple[float, str]]
    reasons: Counter[str] = Counter()
    """Why the samples failed that did."""
    evals: Sequence[tuple[float, Row]] = ()
    """Seconds on the rows' time axis, and a row of evals.jsonl."""
    pace: str = ""
    """`engine.pace` in words, where the whole role has one."""
    idle: Sequence[str] = ()
    """Why a step that had something to teach changed no weight, of each such step."""


def main(argv: Sequence[str]) -> int:
    """Print the summary and write RUN_DIR/report.png; exit 1 with a sentence when there is no step to report."""
    run = read_run(Path(argv[0]))
    if not run.rows:
        print(f"{run.folder}: no step was finished, so there is nothing to report", file=sys.stderr)  # noqa: T201
        return 1
    verdict = summary(run)
    draw(run, verdict[0], run.folder / "report.png")
    print("\n" + "\n".join(verdict))  # noqa: T201
    return 0


def read_run(folder: Path) -> Run:
    """Read metrics.jsonl, evals.jsonl, samples.jsonl, config.yaml and the node agent's log. Torn and damaged lines are left out."""
    config: dict[str, Any] = read_yaml((folder / "config.yaml").read_text())
    config |= {name: fill_tree(config[name], name)[0] for name in ("run", "staleness")}
    rows = _lines(folder / "metrics.jsonl")
    ends = Counter((str(end["fate"]), str(end.get("reason", ""))) for text in read_lines(folder) for end in _objects([text]))
    fates, reasons = Counter[str](), Counter[str]()
    for (fate, reason), num in ends.items():
        fates[fate] += num
        reasons[reason] += num * (fate == "failed")
    train = TrainSection.model_validate(config.get("train") or {})
    idle = [why for row in rows if (why := idle_cause(row, train))]
    log = _lines(folder / "logs" / "node-1.jsonl")
    died = [line for line in log if line.get("event") == "died"]
    deaths = [(_on_axis(datetime.fromisoformat(line["t"]).timestamp(), rows), str(line["actor"])) for line in died]
    evals = [(_on_axis(row.get("unix_s", 0.0), rows), row) for row in _lines(folder / "evals.jsonl")]
    model = str(config.get("model", {}).get("path", ""))
    alpha = StalenessSection.model_validate(config["staleness"]).bound
    pace = ", ".join(f"{key} {value}" for key, value in (config.get("engine", {}).get("pace") or {}).items())
    steps, task = int(config["run"]["steps"]), _played(config)
    return Run(folder, rows, fates, alpha, steps, model, task, deaths, reasons, evals, pace, idle)


def _played(config: Mapping[str, Any]) -> str:
    """What was trained on: the names of the tasks, else the class of the environment."""
    if tasks := config.get("tasks"):
        names = [name for name, task in tasks.items() if task.get("weight", 1.0)]
        return ", ".join(names[:3]) + (", …" if len(names) > 3 else "")
    return str((config.get("env") or {}).get("class", "")).rsplit(":", 1)[-1]


def summary(run: Run) -> list[str]:
    """What was reached, what spoils it where something does, who was busy and what that suggests, where to look next."""
    rows = run.rows
    first, last = rows[0], rows[-10:]
    reward = fmean(r["reward/mean"] for r in last)
    wall = last[-1].get("time/wall_s", 0.0)
    age = max(r.get("staleness/max", 0.0) for r in rows)
    eval_text = f" ({_held_out(run.evals[-1][1])})" if run.evals else ""
    steps, wanted = int(rows[-1]["step"]), run.steps
    reached = "done" if steps >= wanted else f"stopped at step {steps} of {wanted}"
    if len(run.idle) == len(rows):
        reached = f"nothing was learned, {reached}"
    return [
        f"{reached}: reward {first['reward/mean']:.2f} → {reward:.2f}{eval_text} in {steps} steps, {_duration(wall)}"
        f" · {_counted(run.fates)}, age ≤ {age:.0f} · {len(run.deaths)} restarts" + (" · paced" if _paced(run) else ""),
        *concerns(run),
        _busy_line(rows, run.alpha),
        f"report {run.folder / 'report.png'} · trace.json opens in ui.perfetto.dev · next: make one of your own (rubato configs quickstart > my_job.yaml), or read docs/embedding.md",
    ]


LOST = {
    "failed": "failed",
    "stale": "dropped",
    "group_too_small": "left in groups too small to train",
    "surplus": "surplus in their groups",
    "poisoned": "poisoned",
    "lost": "lost",
}
"""Fates of samples that were not trained, and what they are called; those `unused` at the end are no loss."""

NOTABLE_SHARE = 0.05
"""Above this share of all samples, or steps, the closing lines say what it means."""


def _counted(fates: Counter[str]) -> str:
    """`384 samples, 128 failed (33 %), 0 dropped`: the first two always, other losses where there are any."""
    total = sum(fates.values())
    told = [
        f"{num:,} {word}" + (f" ({num / total:.1%})" if num else "")
        for fate, word in LOST.items()
        if (num := fates.get(fate, 0)) or fate in ("failed", "stale")
    ]
    return ", ".join([f"{total:,} samples", *told])


def concerns(run: Run) -> list[str]:
    """A line for whatever makes the figures mean less than they seem to."""
    found: list[str] = []
    total, failed = sum(run.fates.values()), run.fates.get("failed", 0)
    if failed > NOTABLE_SHARE * total:
        reason, num = run.reasons.most_common(1)[0]
        what = f", {num:,} of them as {reason}" if reason else ""
        found.append(
            f"! {failed / total:.0%} of the samples failed{what}: the reward above is that of the others alone. "
            f"Why: {run.folder / 'samples.jsonl'} and logs/"
        )
    if (flat := sum(map(is_flat, run.rows))) > NOTABLE_SHARE * len(run.rows):
        found.append(
            f"! in {flat} of {len(run.rows)} steps nothing was learned from rewards: in no group did they have any spread (policy/taught_frac = 0)"
        )
    if len(run.idle) > NOTABLE_SHARE * len(run.rows):
        found.append(f"! in {len(run.idle)} of {len(run.rows)} steps no weight changed: {run.idle[-1]}")
    if row := _paced(run):
        found.append(_pace_line(row, run.pace))
    return found


def _paced(run: Run) -> Row | None:
    """The newest row of which engines were paced."""
    return next((row for row in reversed(run.rows) if "paced/engines" in row), None)


def _pace_line(row: Row, pace: str) -> str:
    num, share = int(row["paced/engines"]), row.get("paced/outlasted_frac", 0.0)
    slow = ": too many, raise engine.pace.scale or give engines more cores" if share > MOST_OUTLASTED else ""
    return (
        f"! times are paced, not measured: {num} {'engine' if num == 1 else 'engines'} lasted what other hardware takes"
        f"{f' ({pace})' if pace else ''}; {share:.1%} of the steps took longer{slow}"
    )


def _held_out(row: Row) -> str:
    """The reward, and of how many rollouts where some failed."""
    reward = f"held-out {row['reward']:.2f}" if "reward" in row else "held-out: no reward"
    num, failed = int(row.get("num", 0)), int(row.get("failed", 0))
    return f"{reward} over {num} of {num + failed} rollouts; {failed} failed" if failed else reward


def _busy_line(rows: list[Row], alpha: int) -> str:
    busy = {role: 1.0 - fmean(values) for role, values in _idle_by_role(rows).items()}
    shown = ", ".join(f"{role} {busy[role]:.0%}" for role in ("engine", "trainer", "env_manager") if role in busy)
    wait = sum(r.get("time/wait_for_batch", 0.0) for r in rows)
    total = sum(r.get("time/step", 0.0) for r in rows) or 1.0
    env = fmean(r.get("rollout/env_frac", 0.0) for r in rows)
    scored = fmean(r.get("rollout/reward_frac", 0.0) for r in rows)
    rewards = f" and {scored:.0%} in reward functions" if scored >= 0.005 else ""
    advice = advice_of(rows, alpha)
    told = f" — {advice.why}" if advice else ""
    return (
        f"busy: {shown}; the trainer waited {wait / total:.0%} of the time for batches, rollouts spent {env:.0%} of theirs in the "
        f"environment{rewards}{told}"
    )


def draw(run: Run, verdict: str, target: Path) -> None:
    """Four panels on one time axis: reward, age against α, idle share per role, queues with weight versions and deaths."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    seconds = [r.get("time/wall_s", r["step"]) for r in run.rows]
    figure, axes = plt.subplots(4, 1, figsize=(10, 11), sharex=True, height_ratios=(3, 1.5, 2, 2))
    _draw_reward(axes[0], run, seconds)
    _draw_age(axes[1], run, seconds)
    _draw_idle(axes[2], run.rows, seconds)
    _draw_queues(axes[3], run.rows, seconds)
    for at, name in run.deaths:
        axes[3].axvline(at, color=EVAL, linewidth=0.8, linestyle=":")
        axes[3].annotate(name, (at, 1.0), xycoords=("data", "axes fraction"), rotation=90, va="top", fontsize=6, color=EVAL)
    for axis in axes:
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    axes[3].set_xlabel("seconds since the first step began")
    figure.suptitle(f"{heading(run)}\n{verdict}", fontsize=10, wrap=True)
    figure.tight_layout()
    figure.savefig(target, dpi=110)


def heading(run: Run) -> str:
    """What ran, on what."""
    model = f"model {run.model}" if run.model else ""
    named = (run.folder.name, run.task, model, f"{os.cpu_count()} cores, {platform.machine()}")
    return " · ".join(filter(None, named))


def _draw_reward(axis: "Axes", run: Run, seconds: list[float]) -> None:
    rewards = [r["reward/mean"] for r in run.rows]
    axis.plot(seconds, rewards, color=REWARD, label="reward (mean of the step's samples)")
    held_out = [(t, row["reward"]) for t, row in run.evals if "reward" in row]
    if held_out:
        axis.plot(*zip(*held_out, strict=True), "o", color=EVAL, label="held-out reward")
    axis.set_ylabel("reward")
    axis.set_ylim(bottom=min(0.0, *rewards))
    axis.legend(loc="lower right", frameon=False)


def _draw_age(axis: "Axes", run: Run, seconds: list[float]) -> None:
    axis.step(seconds, [r.get("staleness/max", 0.0) for r in run.rows], where="mid", color=AGE, label="oldest")
    axis.plot(seconds, [r.get("staleness/mean", 0.0) for r in run.rows], color=AGE, alpha=0.5, label="mean")
    if run.alpha != UNBOUNDED:
        bounds = [r.get("staleness/alpha", run.alpha) for r in run.rows]
        axis.step(seconds, bounds, where="mid", color=ALPHA, linestyle="--", label="α")
    if dropped := [t for t, row in zip(seconds, run.rows, strict=True) if row.get("staleness/dropped")]:
        axis.plot(dropped, [run.alpha] * len(dropped), "x", color=EVAL, label="dropped")
    axis.set_ylabel("age (versions)")
    axis.legend(loc="upper right", frameon=False, ncols=4)


def _draw_idle(axis: "Axes", rows: list[Row], seconds: list[float]) -> None:
    roles = {role: values for role, values in _idle_by_role(rows).items() if len(values) == len(rows)}
    if roles:
        axis.stackplot(seconds, list(roles.values()), labels=list(roles), alpha=0.8)
        axis.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, fontsize=8)
    axis.set_ylabel("idle share, stacked\n(1 = a whole role idle)")


def _draw_queues(axis: "Axes", rows: list[Row], seconds: list[float]) -> None:
    for name, color in (("ready", READY), ("bound", BOUND)):
        axis.plot(seconds, [r.get(f"queue/{name}/depth", 0.0) for r in rows], color=color, label=name)
    for t in seconds[:: max(1, len(seconds) // 60)]:
        axis.axvline(t, ymax=0.04, color=ALPHA, linewidth=0.8)
    axis.set_ylabel("queue depth\n(ticks: weight versions; dotted: deaths)")
    axis.legend(loc="upper right", frameon=False, ncols=2)


def _idle_by_role(rows: list[Row]) -> dict[str, list[float]]:
    """Mean idle share per role and row, roles in name order."""
    found: dict[str, list[float]] = {}
    for row in rows:
        idle = sorted((key[len("idle/") :].rsplit("-", 1)[0], value) for key, value in row.items() if key.startswith("idle/"))
        for role, values in groupby(idle, key=lambda pair: pair[0]):
            found.setdefault(role, []).append(fmean(value for _, value in values))
    return found


def _on_axis(unix_s: float, rows: list[Row]) -> float:
    """When something happened, on the axis of training time: the first row written after it."""
    return next((r["time/wall_s"] for r in rows if r.get("time/unix_s", 0.0) >= unix_s), rows[-1].get("time/wall_s", 0.0) if rows else 0.0)


def _lines(path: Path) -> list[dict[str, Any]]:
    text = path.read_text(errors="replace") if path.is_file() else ""
    return _objects(text[: text.rfind("\n") + 1].splitlines())


def _objects(lines: Iterable[str | bytes]) -> list[dict[str, Any]]:
    rows: list[Any] = []
    for line in lines:
        with suppress(ValueError):
            rows.append(json.loads(line))
    return [row for row in rows if row and isinstance(row, dict)]


def _duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
