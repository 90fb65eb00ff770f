"""What the launcher prints: start-up, one line per step, notices, a progress bar, the last lines."""

from collections.abc import Callable, Mapping
from typing import Protocol

from rich import progress as bars
from rich.console import Console as Rich

from runtime.errors import ConfigError
from runtime.importer import load_configured
from runtime.messages import Progress
from runtime.observe.log import logger


class ConsoleTable(Protocol):
    """How a job's steps read on a terminal; named by `report.console` in the config, because the runtime knows no RL word."""

    def header(self) -> str: ...
    def line(self, step: int, steps: int, row: Mapping[str, float]) -> str: ...


def step_table(target: str) -> ConsoleTable:
    """The table that `report.console` names. Raises ConfigError where it leads to none."""
    found = load_configured(target, key="report.console")
    try:
        table = found()
    except Exception as error:
        raise ConfigError(f"report.console: {target} can't be made: {type(error).__name__}: {error}") from error
    if not (callable(getattr(table, "header", None)) and callable(getattr(table, "line", None))):
        raise ConfigError(f"report.console: {target} has no header() and line(step, steps, row).")
    return table


class Console:
    """Prints for a person on a terminal, and plain lines into a pipe."""

    def __init__(self, table: ConsoleTable, hide: Callable[[str], str] = str) -> None:
        """`hide` takes out of each sentence what may be shown nowhere."""
        self._hide = hide
        self._rich = Rich(highlight=False, soft_wrap=True)
        self._table = table
        self._bar: bars.Progress | None = None
        self._task = bars.TaskID(0)
        self._headed = False
        self._phase = ""

    def say(self, text: str) -> None:
        self._rich.print(self._hide(text), markup=False)

    def stage(self, what: str, text: str, seconds: float | None = None) -> None:
        """One finished stage of the start-up."""
        self.close()
        after = f"ready {seconds:5.1f} s" if seconds is not None else ""
        self._rich.print(f"  {what:<9} {text:<58} {after}".rstrip(), markup=False)

    def preparing(self, what: str, share: float) -> None:
        """A long stage under way; drawn on a terminal only."""
        if self._rich.is_terminal:
            self._draw(f"  {what}", share, 1.0)

    def actors(self, ready: int, wanted: int) -> None:
        if self._rich.is_terminal and wanted:
            self._draw("  actors", ready, wanted, bars.MofNCompleteColumn())

    def progress(self, message: Progress) -> None:
        if not self._headed:
            self.close()
            self._headed = True
            self._rich.print("\n" + self._table.header(), markup=False)
        self._rich.print(self._table.line(message.step, message.steps, message.row), markup=False)
        if self._rich.is_terminal:
            self._draw("  steps", message.step, message.steps, bars.MofNCompleteColumn(), bars.TimeRemainingColumn())

    def notice(self, text: str, *, good: bool = False) -> None:
        """Said now, and kept in the log of this host's node agent, where the monitor finds it."""
        text = self._hide(text)
        logger("launch").info("notice", text=text, good=good)
        self._rich.print(f" [{'green' if good else 'yellow'}]{'✓' if good else '!'}[/] ", end="")
        self._rich.print(text, markup=False)

    def close(self) -> None:
        """Take the bar off the screen."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _draw(self, what: str, done: float, total: float, *columns: bars.ProgressColumn) -> None:
        if self._bar is None or self._phase != what:
            self.close()
            shown = (bars.TextColumn("{task.description}"), bars.BarColumn(48), *columns)
            self._bar = bars.Progress(*shown, console=self._rich, transient=True)
            self._phase = what
            self._task = self._bar.add_task(what, total=total)
            self._bar.start()
        self._bar.update(self._task, completed=done, total=total)
