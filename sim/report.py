"""Writes a run's folder: run.json, one CSV per table, one PNG per plot, and a trace for ui.perfetto.dev.

The same scenario and seed give the same bytes in run.json, the CSVs and the trace.
"""

import csv
import hashlib
import json
import platform
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib import metadata
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, Final

from rubato.runtime.errors import ConfigError
from rubato.sim.claims import FigureClaim
from rubato.sim.outcome import Cell, LaneSpan, Plot, RunResult, Table
from rubato.sim.scenario import Scenario

DPI = 130


TABLES: Final = frozenset(
    {
        "agreement",
        "circuits",
        "cost",
        "links",
        "modes",
        "phases",
        "plans",
        "sensitivity",
        "splits",
        "staleness",
        "tasks",
        "useful",
        "windows",
    }
)
PLOTS: Final = frozenset(
    {"affinity", "agreement", "cost", "generation", "modelsync", "sigma", "splits", "staleness", "tail", "throughput", "useful", "windows"}
)
"""What the kinds call theirs: the files of an earlier run, of whatever kind, that a new one in its folder removes."""


@contextmanager
def folder_for(folder: Path, *, force: bool) -> Iterator[None]:
    """`folder` takes a run, which is found out before the work; made for it, it goes again where it stays empty.

    Raises ConfigError where it can't be written, or holds a run: with `force`, one that is not a simulation's.
    """
    made: list[Path] = []
    try:
        made += [place for place in (folder, *folder.parents) if not place.exists()]
        if (folder / "run.json").exists():
            _check_replaceable(folder, force=force)
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):
            pass
    except OSError as error:
        _remove_empty(made)
        raise ConfigError(f"{folder} can't be written: {error.strerror}. Give another --out.") from error
    try:
        yield
    finally:
        _remove_empty(made)


def _check_replaceable(folder: Path, *, force: bool) -> None:
    if not force:
        raise ConfigError(f"{folder} already holds a run. Add --force to overwrite it, or give another --out.")
    try:
        ours = json.loads((folder / "run.json").read_text()).get("simulated") is True
    except (ValueError, AttributeError):
        ours = False
    if not ours:
        raise ConfigError(f"{folder} holds a run.json that is no simulation's. Give another --out.")


def _remove_empty(folders: Sequence[Path]) -> None:
    for folder in folders:
        with suppress(OSError):
            folder.rmdir()


def write(folder: Path, scenario: Scenario, outcome: RunResult, claims: Sequence[FigureClaim], *, plots: bool) -> None:
    """Everything of one run into `folder`, where nothing of an earlier one is left. Raises ConfigError where it can't be written."""
    try:
        _write(folder, scenario, outcome, claims, plots=plots)
    except OSError as error:
        raise ConfigError(f"{folder} can't be written: {error.strerror}. Give another --out.") from error


def _write(folder: Path, scenario: Scenario, outcome: RunResult, claims: Sequence[FigureClaim], *, plots: bool) -> None:
    if unknown := (outcome.tables.keys() - TABLES) | (outcome.plots.keys() - PLOTS):
        raise RuntimeError(f"sim/report.py must name {', '.join(sorted(unknown))}, or --force would leave it")
    if (folder / "run.json").exists():
        for name in ("run.json", "trace.json", *(f"{t}.csv" for t in TABLES), *(f"{p}.png" for p in PLOTS)):
            (folder / name).unlink(missing_ok=True)
    for name, table in sorted(outcome.tables.items()):
        _write_table(folder / f"{name}.csv", table)
    for name, plot in sorted(outcome.plots.items() if plots else ()):
        _write_plot(folder / f"{name}.png", plot, scenario)
    (folder / "trace.json").write_text(json.dumps(trace(outcome.spans)) + "\n")
    (folder / "run.json").write_text(json.dumps(_summary(scenario, outcome, claims), indent=1) + "\n")


def _summary(scenario: Scenario, outcome: RunResult, claims: Sequence[FigureClaim]) -> dict[str, Any]:
    resolved = scenario.model_dump(mode="json")
    text = json.dumps(resolved, sort_keys=True)
    return {
        "simulated": True,
        "title": scenario.title,
        "source": scenario.source,
        "calibration": scenario.calibration,
        "seed": scenario.seed,
        "claims": [claim._asdict() for claim in claims],
        "figures": dict(sorted(outcome.figures.items())),
        "chosen": dict(scenario.chosen),
        "notes": list(outcome.notes),
        "versions": {"python": platform.python_version(), "numpy": metadata.version("numpy")},
        "scenario_sha256": hashlib.sha256(text.encode()).hexdigest(),
        "scenario": resolved,
    }


def _write_table(path: Path, table: Table) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(table.columns)
        writer.writerows([_cell(cell) for cell in row] for row in table.rows)


def _cell(cell: Cell) -> str:
    """Ten digits: enough for any figure here, and free of the last bit in which a sum's order shows."""
    if isinstance(cell, bool):
        return "true" if cell else "false"
    return f"{cell:.10g}" if isinstance(cell, float) else str(cell)


def _write_plot(path: Path, plot: Plot, scenario: Scenario) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=plot.size_in, layout="constrained")
    plot.draw(figure)
    figure.suptitle(plot.title)
    figure.supxlabel(f"simulated · {scenario.calibration}", fontsize=7, color="0.4")
    figure.savefig(path, dpi=DPI)


def trace(spans: Sequence[LaneSpan]) -> Mapping[str, Any]:
    """The spans in the Chrome trace format; a process's and a lane's number follow their first appearance."""
    processes: dict[str, int] = {}
    lanes: dict[tuple[str, str], int] = {}
    events: list[Mapping[str, Any]] = []
    for span in spans:
        if span.process not in processes:
            processes[span.process] = len(processes) + 1
            events.append(_named("process_name", processes[span.process], 0, span.process))
        pid = processes[span.process]
        if (span.process, span.lane) not in lanes:
            lanes[span.process, span.lane] = len(lanes) + 1
            events.append(_named("thread_name", pid, lanes[span.process, span.lane], span.lane))
        events.append(
            {
                "ph": "X", "name": span.name, "pid": pid, "tid": lanes[span.process, span.lane],
                "ts": round(span.start_s * 1e6, 3), "dur": round(span.duration_s * 1e6, 3), "args": dict(span.args),
            }
        )  # fmt: skip
    return {"displayTimeUnit": "ms", "traceEvents": events}


def _named(what: str, pid: int, tid: int, name: str) -> Mapping[str, Any]:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {"name": name}}
