"""What a scenario's runner hands back: figures, tables, plots and spans, all of virtual time."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from rubato.sim.claims import Value

Cell = str | int | float | bool


class RunProgress(Protocol):
    """Told how far a run is; called from the runner's thread between two cells of its work."""

    def __call__(self, done: int, total: int, what: str) -> None: ...


class Table(NamedTuple):
    """One CSV file: rows in the order in which they are written."""

    columns: tuple[str, ...]
    rows: Sequence[tuple[Cell, ...]]


class Plot(NamedTuple):
    """One PNG; `draw` gets an empty matplotlib Figure. The report adds the line that says simulated, and on what."""

    title: str
    draw: Callable[[Any], None]
    size_in: tuple[float, float] = (8.0, 4.5)


class LaneSpan(NamedTuple):
    """A stretch of virtual time on a lane of a process, for the Chrome trace."""

    process: str
    lane: str
    name: str
    start_s: float
    duration_s: float
    args: Mapping[str, Cell] = {}


@dataclass(frozen=True, slots=True)
class RunResult:
    """A run's results; nothing in it may depend on the wall clock or on the order of a set."""

    figures: Mapping[str, Value]
    """By name; claims are about these."""
    tables: Mapping[str, Table] = field(default_factory=dict)
    """By file name without .csv, such as phases, links, circuits, cost."""
    plots: Mapping[str, Plot] = field(default_factory=dict)
    """By file name without .png."""
    spans: Sequence[LaneSpan] = ()
    notes: Sequence[str] = ()
    """Conditions under which the figures hold, printed with them."""


def silent(done: int, total: int, what: str) -> None:
    """A Progress that shows nothing."""
