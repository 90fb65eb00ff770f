"""Writes a run's folder: run.json, one CSV per table, one PNG per plot, and a trace for ui.perfetto.dev.

The same scenario and seed give the same bytes in run.json, the CSVs and the trace.
"""

import csv
import hashlib
import json
import platform
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from sim.claims import Claim
from sim.outcome import Cell, Outcome, Plot, Span, Table
from sim.scenario import Scenario

DPI = 130


def write(folder: Path, scenario: Scenario, outcome: Outcome, claims: Sequence[Claim], *, plots: bool) -> None:
    """Everything of one run into `folder`, which is made."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, table in sorted(outcome.tables.items()):
        _write_table(folder / f"{name}.csv", table)
    for name, plot in sorted(outcome.plots.items() if plots else ()):
        _write_plot(folder / f"{name}.png", plot, scenario)
    (folder / "trace.json").write_text(json.dumps(trace(outcome.spans)) + "\n")
    (folder / "run.json").write_text(json.dumps(_summary(scenario, outcome, claims), indent=1) + "\n")


def _summary(scenario: Scenario, outcome: Outcome, claims: Sequence[Claim]) -> dict[str, Any]:
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


def trace(spans: Sequence[Span]) -> Mapping[str, Any]:
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
