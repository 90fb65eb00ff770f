"""What the launcher prints: start-up, one line per step, notices, a progress bar, the last lines; and that none of it can hold the job up."""

import errno
import io
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import Protocol, TextIO

from rich import progress as bars
from rich.console import Console as Rich

from rubato.runtime.errors import NO_ROOM, ConfigError
from rubato.runtime.importer import load_configured
from rubato.runtime.messages import Progress
from rubato.runtime.observe.log import logger

WAITING = 4096
"""Texts that wait for a reader who is slow, or for room on a disk; further ones are dropped."""
PAUSE_S = 0.2
"""Before a stream that takes nothing now is tried again; the system sends no event when a disk has room."""
LAST_S = 1.0
"""For what is still unwritten when the launcher ends."""
TAKES_NOTHING_NOW = NO_ROOM | {errno.EAGAIN}


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
        self._rich = Rich(highlight=False, soft_wrap=True, emoji=False)
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


# -- streams whose reader may be gone --------------------------------------------------------------------------------


@contextmanager
def unhindered() -> Generator[None]:
    """Within the block nothing that is printed raises, or waits for its reader: a closed pipe or terminal takes no more, and the rest is dropped;
    a full disk or a reader who pauses gets it later.
    """
    there = sys.stdout, sys.stderr
    writer = _Writer()
    sys.stdout, sys.stderr = (_Unhindered(stream, writer) if _has_number(stream) else stream for stream in there)
    try:
        yield
    finally:
        writer.end()
        sys.stdout, sys.stderr = there


def settle() -> None:
    """Return once what was printed is written, before another process prints to the same place. Blocks, for a second at most."""
    if isinstance(sys.stdout, _Unhindered):
        sys.stdout.settle()


class _Writer:
    """Writes texts in their order, in a thread of its own: a terminal may hold a write up for as long as it likes."""

    def __init__(self) -> None:
        self._texts: deque[tuple[int, bytes]] = deque()
        self._changed = threading.Condition()
        self._gone: set[int] = set()
        """Numbers of streams that take nothing any more."""
        self._ended = self._writing = False
        self._thread = threading.Thread(target=self._run, name="console", daemon=True)
        self._thread.start()

    def put(self, number: int, text: bytes) -> None:
        with self._changed:
            if number not in self._gone and len(self._texts) < WAITING:
                self._texts.append((number, text))
                self._changed.notify_all()

    def settle(self) -> None:
        """Return once all is written, or can't be within `LAST_S`. Blocks."""
        with self._changed:
            self._changed.wait_for(lambda: not self._texts and not self._writing, LAST_S)

    def end(self) -> None:
        """Write no more than what is left, for `LAST_S`."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()
        self._thread.join(LAST_S)

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._texts and not self._ended:
                    self._changed.wait()
                if not self._texts:
                    return
                (number, text), self._writing = self._texts.popleft(), True
            while text and number not in self._gone:
                text = self._written(number, text)
            with self._changed:
                self._writing = False
                self._changed.notify_all()

    def _written(self, number: int, text: bytes) -> bytes:
        """What is left of `text` after one attempt."""
        try:
            return text[os.write(number, text) :]
        except OSError as error:
            if error.errno not in TAKES_NOTHING_NOW:
                self._gone.add(number)
                logger("launch").warning("output_lost", stream=number, error=error.strerror)
                return b""
        with self._changed:
            self._changed.wait_for(lambda: self._ended, PAUSE_S)
            if self._ended:
                self._gone.add(number)
        return text


class _Unhindered(io.TextIOBase):
    """As `stream` looks, but what is written to it goes through `writer`."""

    def __init__(self, stream: TextIO, writer: _Writer) -> None:
        self._number, self._writer, self._is_terminal = stream.fileno(), writer, stream.isatty()
        self._coding = (stream.encoding or "utf-8", stream.errors or "replace")
        stream.flush()

    @property
    def encoding(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self._coding[0]

    def write(self, text: str) -> int:
        self._writer.put(self._number, text.encode(*self._coding))
        return len(text)

    def settle(self) -> None:
        self._writer.settle()

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._number

    def isatty(self) -> bool:
        return self._is_terminal


def _has_number(stream: object) -> bool:
    """Whether it is a stream of this process, not closed, and not what a test or a notebook put there."""
    try:
        return isinstance(stream, io.TextIOBase) and stream.fileno() >= 0
    except (OSError, ValueError):
        return False
