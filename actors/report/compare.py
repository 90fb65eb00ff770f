"""`rubato compare RUN RUN…`: the curves and final figures of several runs side by side, those that differ by their seed as one setting."""

import argparse
import copy
import difflib
import json
import statistics
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any, cast

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from rubato.runtime.config.differences import differing
from rubato.runtime.errors import ExitCode, LaunchError
from rubato.runtime.launch.folder import CHANGES
from rubato.runtime.monitor.snapshot import Row
from rubato.runtime.monitor.source import RowTail, read_config
from rubato.runtime.monitor.text import BLOCKS, clock

APART = ("run.seed", "run.name", "run.dir", "state.url", "checkpoint.mirror", "bus.host", "bus.port", "bus.ports")
"""Keys on which runs of one setting may differ."""

REWARD, HELD_OUT = "reward/mean", "eval/reward"
LAST = 10
"""Rows over which a final figure is the mean: one step alone is noise."""

WIDTH = 40
"""Columns of a curve."""

Curve = list[tuple[float, float]]


@dataclass(frozen=True)
class Changed:
    """The values of a key that a run was resumed with, in order; runs agree on it whose values do, wherever they changed."""

    values: tuple[Any, ...]
    from_steps: tuple[int, ...] = field(compare=False)
    """The first step under each."""

    def __str__(self) -> str:
        later = zip(self.values[1:], self.from_steps[1:], strict=True)
        return ", ".join([str(self.values[0]), *(f"{value} from step {step}" for value, step in later)])


@dataclass(frozen=True, slots=True)
class ComparedRun:
    """One run: `curves` has (step, value) of each metric."""

    folder: Path
    config: dict[str, Any]
    steps: int
    wall_s: float
    curves: dict[str, Curve]
    values: dict[str, Any]
    """The config, with a `Changed` for each key that several values were trained under."""

    @property
    def seed(self) -> int:
        return int((self.config.get("run") or {}).get("seed", 0))

    @property
    def planned(self) -> int:
        """Steps that it was to train."""
        return int((self.config.get("run") or {}).get("steps", 0))

    @property
    def is_paced(self) -> bool:
        """Whether engines lasted what other hardware takes: its times are not of the host that it ran on."""
        return "paced/engines" in self.curves

    def final(self, metric: str) -> float | None:
        """The mean over the last `LAST` rows; of an evaluation the newest alone. None where the run has none."""
        values = [value for _, value in self.curves.get(metric, ())]
        last = values[-1:] if metric.startswith("eval/") else values[-LAST:]
        return statistics.fmean(last) if last else None


@dataclass
class Setting:
    """Runs whose configs agree but for `APART`. `keys` are those on which settings differ, with its own values."""

    name: str
    runs: list[ComparedRun]
    keys: dict[str, Any] = field(default_factory=dict)

    def figure(self, metric: str) -> tuple[float, float] | None:
        """Mean and sample standard deviation over the runs that have the metric; 0 where there is one."""
        found = [value for run in self.runs if (value := run.final(metric)) is not None]
        if not found:
            return None
        return statistics.fmean(found), statistics.stdev(found) if len(found) > 1 else 0.0

    def curve(self, metric: str) -> Curve:
        """The mean over the runs at each step that any of them has."""
        points: dict[float, list[float]] = {}
        for run in self.runs:
            for step, value in run.curves.get(metric, ()):
                points.setdefault(step, []).append(value)
        return [(step, statistics.fmean(values)) for step, values in sorted(points.items())]


def main(argv: Sequence[str]) -> int:
    """Print tables and curves, or JSON; RubatoError is the caller's to print."""
    parser = argparse.ArgumentParser("rubato compare", description="Compare runs: curves, final figures, differing keys.")
    parser.add_argument(
        "runs", nargs="+", type=Path, metavar="RUN", help="folders of runs; those that differ by their seed alone are averaged"
    )
    parser.add_argument("--metric", action="append", metavar="NAME", help=f"instead of {REWARD} and {HELD_OUT}; may be given again")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    given = parser.parse_args(list(argv))
    runs = [read_run(folder) for folder in dict.fromkeys(given.runs)]
    metrics = list(dict.fromkeys(given.metric or (REWARD, HELD_OUT)))
    check_metrics(metrics, runs)
    settings = group(runs)
    if given.json:
        print(json.dumps(as_json(settings, metrics)))  # noqa: T201
    else:
        show(settings, metrics, Console(highlight=False))
    return ExitCode.DONE


def read_run(folder: Path) -> ComparedRun:
    """What a run folder tells, whether it runs, has ended or was killed. Raises LaunchError where it holds no step."""
    if not (folder / "config.yaml").is_file():
        raise LaunchError(f"{folder} holds no run: there is no config.yaml in it.")
    rows = RowTail(folder / "metrics.jsonl").read()
    if not rows:
        raise LaunchError(f"{folder} has no step yet: there is nothing to compare.")
    curves: dict[str, Curve] = {}
    for row in rows:
        for name, value in row.items():
            if not name.startswith("eval/"):
                curves.setdefault(name, []).append((row["step"], value))
    for row in RowTail(folder / "evals.jsonl").read():
        for name, value in row.items():
            curves.setdefault(f"eval/{name}", []).append((row.get("version", 0.0), value))
    config = read_config(folder / "config.yaml")
    values = with_changes(config, _changes(folder), rows)
    return ComparedRun(folder, config, int(rows[-1]["step"]), rows[-1].get("time/wall_s", 0.0), curves, values)


def with_changes(config: dict[str, Any], changes: Sequence[tuple[float, str, Any, Any]], rows: Sequence[Row]) -> dict[str, Any]:
    """The config that `rows` were trained under, with a `Changed` for each key that had several values.

    `changes` has (time, key, old, new), oldest first; one after which no step was trained is none.
    """
    found = copy.deepcopy(config)
    history: dict[str, list[tuple[int, Any]]] = {}
    for unix_s, key, old, new in changes:
        at = next((int(row["step"]) for row in rows if row.get("time/unix_s", 0.0) >= unix_s), 0)
        values = history.setdefault(key, [(int(rows[0]["step"]), old)])
        if at and at <= values[-1][0]:
            values[-1] = (values[-1][0], new)  # nothing was trained under the one before
        elif at and new != values[-1][1]:
            values.append((at, new))
    for key, values in history.items():
        *above, name = key.split(".")
        place: Any = found
        for part in above:
            place = place.setdefault(part, {}) if isinstance(place, dict) else {}
        if isinstance(place, dict):
            given = tuple(value for _, value in values)
            place[name] = Changed(given, tuple(step for step, _ in values)) if len(given) > 1 else values[0][1]
    return found


def _changes(folder: Path) -> list[tuple[float, str, Any, Any]]:
    """Of a run folder; a torn or damaged line is left out."""
    found: list[tuple[float, str, Any, Any]] = []
    path = folder / CHANGES
    for line in path.read_text(errors="replace").splitlines() if path.is_file() else ():
        with suppress(ValueError, KeyError, TypeError):
            told = json.loads(line)
            found += [(float(told["unix_s"]), str(each["key"]), each["old"], each["new"]) for each in told["changed"]]
    return found


def check_metrics(metrics: Sequence[str], runs: Sequence[ComparedRun]) -> None:
    """Raises LaunchError for a metric that no run has."""
    known = {name for run in runs for name in run.curves}
    for name in metrics:
        if name not in known and name != HELD_OUT:
            near = difflib.get_close_matches(name, known, n=1)
            raise LaunchError(f"no run has the metric {name}." + (f" Did you mean {near[0]}?" if near else ""))


def group(runs: Sequence[ComparedRun]) -> list[Setting]:
    """Settings in the order in which they were named, each with the keys on which they differ."""
    settings: list[Setting] = []
    for run in runs:
        same = next((s for s in settings if not _differing(s.runs[0], run)), None)
        if same is None:
            settings.append(Setting(chr(ord("A") + len(settings)) if len(settings) < 26 else f"S{len(settings) + 1}", [run]))
        else:
            same.runs.append(run)
    keys = dict.fromkeys(key for a, b in combinations(settings, 2) for key in _differing(a.runs[0], b.runs[0]))
    keys |= dict.fromkeys(key for run in runs for key in _changed_keys(run.values))
    for setting in settings:
        setting.keys = {key: _value(setting.runs[0].values, key) for key in keys}
    return settings


def _differing(one: ComparedRun, other: ComparedRun) -> list[str]:
    return [change.key for change in differing(one.values, other.values) if change.key not in APART]


def _changed_keys(values: dict[str, Any], above: str = "") -> Iterator[str]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _changed_keys(cast("dict[str, Any]", value), f"{above}{name}.")
        elif isinstance(value, Changed) and f"{above}{name}" not in APART:
            yield f"{above}{name}"


def _value(config: Any, key: str) -> Any:
    for part in key.split("."):
        config = config.get(part) if isinstance(config, dict) else None
    return config


def as_json(settings: Sequence[Setting], metrics: Sequence[str]) -> dict[str, Any]:
    """The same for a program: `sd` is the sample standard deviation over the runs of a setting."""
    return {
        "settings": [
            {
                "name": setting.name,
                "keys": {k: str(v) if isinstance(v, Changed) else v for k, v in setting.keys.items()},
                "runs": [
                    {
                        "run": str(run.folder),
                        "seed": run.seed,
                        "steps": run.steps,
                        "wall_s": run.wall_s,
                        "paced": run.is_paced,
                        "final": {name: run.final(name) for name in metrics},
                        "curves": {name: run.curves.get(name, []) for name in metrics},
                    }
                    for run in setting.runs
                ],
                "final": {
                    name: {"mean": found[0], "sd": found[1], "num": sum(run.final(name) is not None for run in setting.runs)}
                    for name in metrics
                    if (found := setting.figure(name))
                },
            }
            for setting in settings
        ]
    }


# -- on a terminal -----------------------------------------------------------------------------------------------


def show(settings: Sequence[Setting], metrics: Sequence[str], console: Console) -> None:
    """Print the settings and how they differ, the final figures, and a curve for each metric and run."""
    for setting in settings:
        keys = "  ".join(f"{key}={_short(value)}" for key, value in setting.keys.items()) or "the same config"
        console.print(f"{setting.name}  {escape(keys)}  [dim]({_runs(len(setting.runs))})[/]")
    console.print()
    console.print(figures(settings, metrics))
    console.print(f"[dim]means over the last {LAST} steps; of an evaluation the newest[/]")
    for run in (run for setting in settings for run in setting.runs if run.steps < run.planned):
        console.print(f"! {run.folder} has {run.steps} of {run.planned} steps: its figures are of step {run.steps}", markup=False)
    for run in (run for setting in settings for run in setting.runs if run.is_paced):
        console.print(
            f"! {run.folder} is paced (engine.pace): its times are those of other hardware, not measured", markup=False, soft_wrap=True
        )
    for metric in metrics:
        console.print()
        for line in curves(settings, metric):
            console.print(line, markup=False, soft_wrap=True)


def figures(settings: Sequence[Setting], metrics: Sequence[str]) -> Table:
    """One line for each run, and for each setting of several its mean ± sample standard deviation."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("", "run", "seed", "steps", "time", *metrics):
        table.add_column(name, justify="left" if name in ("", "run") else "right", no_wrap=name != "run", overflow="fold")
    for setting in settings:
        for run in setting.runs:
            values = [_figure(run.final(name)) for name in metrics]
            table.add_row(setting.name, escape(str(run.folder)), str(run.seed), str(run.steps), clock(run.wall_s), *values)
        if len(setting.runs) > 1:
            means = [_spread(setting.figure(name)) for name in metrics]
            table.add_row(setting.name, f"mean ± sd of {len(setting.runs)}", "", "", "", *means, style="bold")
    return table


def curves(settings: Sequence[Setting], metric: str) -> list[str]:
    """A title with the common scale, then a line for each run, all over the same steps; of several runs the mean first."""
    drawn: list[tuple[str, Curve, str]] = []
    for setting in settings:
        several = len(setting.runs) > 1
        if several:
            drawn.append((f"{setting.name} mean", setting.curve(metric), _spread(setting.figure(metric))))
        for run in setting.runs:
            name = f"  seed {run.seed}" if several else f"{setting.name} seed {run.seed}"
            drawn.append((name, run.curves.get(metric, []), _figure(run.final(metric))))
    points = [point for _, curve, _ in drawn for point in curve]
    if not points:
        return [f"{metric}: none yet"]
    low, high = min(value for _, value in points), max(value for _, value in points)
    last = max(step for step, _ in points)
    title = f"{metric}, steps 0 to {last:.0f}, from {_figure(low)} (▁) to {_figure(high)} (█)"
    width = max(len(name) for name, _, _ in drawn)
    return [title, *(f"{name:<{width}}  {line(curve, last, low, high)}  {told}" for name, curve, told in drawn)]


def line(curve: Curve, last: float, low: float, high: float) -> str:
    """`WIDTH` blocks over steps 0 to `last`, each the mean of its steps; a gap holds what came before it."""
    cells: list[list[float]] = [[] for _ in range(WIDTH)]
    for step, value in curve:
        cells[min(WIDTH - 1, int(step / max(1.0, last) * WIDTH))].append(value)
    drawn, held = "", " "
    end = max((index for index, cell in enumerate(cells) if cell), default=-1)
    for index, cell in enumerate(cells):
        if cell:
            share = (statistics.fmean(cell) - low) / (high - low) if high > low else 0.0
            held = BLOCKS[int(share * (len(BLOCKS) - 1) + 0.5)]
        drawn += held if index <= end else " "
    return drawn


def _figure(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}" if abs(value) < 100 else f"{value:,.0f}"


def _spread(found: tuple[float, float] | None) -> str:
    return "–" if found is None else f"{_figure(found[0])} ± {_figure(found[1])}"


def _runs(num: int) -> str:
    return "1 run" if num == 1 else f"{num} runs"


def _short(value: Any) -> str:
    text = "not set" if value in (None, "", [], {}) else json.dumps(value) if isinstance(value, (dict, list)) else str(value)
    return text if len(text) <= 40 else text[:39] + "…"
