"""Spans of what each actor did when; timeline.py makes one file of them."""

import asyncio
import heapq
import os
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import msgspec

MAX_BYTES = 8 * 1024 * 1024
"""Per actor, some 50,000 events: what a browser still draws with ten actors."""

SAMPLED_FROM = 0.5
"""Once half of that is used, one span of `SAMPLE` is kept, so that a long run still shows its end."""

SAMPLE = 16

FLUSH_S = 1.0
"""What a killed actor's trace may lack."""

BUFFERED = 256
"""Lines gathered before they are written, so that a line costs no system call."""


def wall_s() -> float:
    """Seconds since the epoch: for what a person reads, never for measuring or waiting. On a virtual loop its time, so runs replay."""
    loop = asyncio._get_running_loop()  # pyright: ignore[reportPrivateUsage] - None where no loop runs
    if loop is not None and getattr(loop, "virtual", False):
        return loop.time()
    return time.time()  # noqa: TID251 - the single place


def append_whole(fd: int, content: bytes, *, sync: bool = False) -> None:
    """Append all of `content` to an open file, or nothing and OSError. Blocks."""
    start = os.lseek(fd, 0, os.SEEK_END)
    try:
        view = memoryview(content)
        while view:
            view = view[os.write(fd, view) :]
        if sync:
            os.fsync(fd)
    except OSError:
        os.ftruncate(fd, start)
        raise


class Trace:
    """The spans of one actor, on its loop, in the file `path`, at most `max_bytes` with those of an earlier process; `Trace(None)` keeps
    none and costs next to nothing.

    Spans of one task nest; those of tasks that overlap are drawn in lanes beside each other. Past `SAMPLED_FROM` of `max_bytes`
    spans are sampled, past all of it dropped, and `close` notes how many are missing.
    """

    def __init__(self, path: Path | None, *, max_bytes: int = MAX_BYTES) -> None:
        self._path, self._max_bytes = path, max_bytes
        self._file: IO[bytes] | None = None
        self._left = max_bytes
        self._lines: list[bytes] = []
        self._flushed_us = 0.0
        self._seen = 0
        self._missing = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._offset_s = 0.0
        self._lanes: dict[int, tuple[int, int]] = {}
        self._free: list[int] = []
        self._num_lanes = 0

    @contextmanager
    def span(self, name: str, category: str = "", **args: Any) -> Generator[None, None, None]:
        """`with trace.span("train_step", step=3):` around the work; `args` must be plain values."""
        if self._path is None:
            yield
            return
        task, began_us = id(asyncio.current_task()), self._now_us()
        event = {"ph": "X", "name": name, "cat": category, "ts": began_us, "tid": self._enter_lane(task), "args": args}
        try:
            yield
        except (Exception, asyncio.CancelledError) as error:
            args["raised"] = type(error).__name__
            raise
        finally:
            self._leave_lane(task)
            self._add(self._path, event | {"dur": self._now_us() - began_us})

    def close(self) -> None:
        """Write out what is held, and how much is missing; a later span opens the file again."""
        if self._missing:
            name = f"{self._missing} spans are not shown"
            note = {"ph": "i", "s": "p", "name": name, "ts": self._now_us(), "tid": 0}
            self._lines.append(msgspec.json.encode(note) + b"\n")
            self._missing = 0
        if self._file is not None:
            self._flush(self._file)
            with suppress(OSError):
                self._file.close()
            self._file = None

    def _now_us(self) -> float:
        """Microseconds since the epoch, going on evenly with the loop's clock (from 0 where time is virtual)."""
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._offset_s = wall_s() - self._loop.time()
        return (self._loop.time() + self._offset_s) * 1e6

    def _enter_lane(self, task: int) -> int:
        """The lane of the task's outermost span; a free one where this is the outermost."""
        lane, depth = self._lanes.get(task, (-1, 0))
        if lane < 0:
            lane = heapq.heappop(self._free) if self._free else self._num_lanes
            self._num_lanes = max(self._num_lanes, lane + 1)
        self._lanes[task] = (lane, depth + 1)
        return lane

    def _leave_lane(self, task: int) -> None:
        lane, depth = self._lanes.pop(task)
        if depth > 1:
            self._lanes[task] = (lane, depth - 1)
        else:
            heapq.heappush(self._free, lane)

    def _add(self, path: Path, event: dict[str, Any]) -> None:
        try:
            file = self._file = self._file or self._opened(path)
        except OSError:
            self._missing += 1
            return
        line = msgspec.json.encode(event) + b"\n"
        self._seen += 1
        sampled = self._left < (1.0 - SAMPLED_FROM) * self._max_bytes and self._seen % SAMPLE
        if sampled or len(line) > self._left:
            self._missing += 1
            return
        self._left -= len(line)
        self._lines.append(line)
        now_us = self._now_us()
        if len(self._lines) >= BUFFERED or now_us - self._flushed_us > FLUSH_S * 1e6:
            self._flushed_us = now_us
            self._flush(file)

    def _opened(self, path: Path) -> IO[bytes]:
        """A line that a killed process left half written is closed off, never continued."""
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("ab+")
        size = file.seek(0, os.SEEK_END)
        self._left = self._max_bytes - size
        if size:
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                self._lines.append(b"\n")
        return file

    def _flush(self, file: IO[bytes]) -> None:
        """What a disk refuses is missing: no work fails for its trace."""
        try:
            append_whole(file.fileno(), b"".join(self._lines))
        except OSError:
            self._missing += len(self._lines)
        self._lines.clear()


def trace_path(run_folder: Path, actor: str) -> Path:
    """Where `actor` writes its spans."""
    return run_folder / "trace" / f"{actor}.jsonl"
