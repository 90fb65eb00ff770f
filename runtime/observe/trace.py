"""Spans of what each actor did when, merged into one trace.json that opens in ui.perfetto.dev."""

import asyncio
import heapq
import os
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import msgspec

from runtime.clock import wall_s

MAX_BYTES = 8 * 1024 * 1024
"""Per actor, some 50,000 events: what a browser still draws with ten actors."""

SAMPLED_FROM = 0.5
"""Once half of that is used, one span of `SAMPLE` is kept, so that a long run still shows its end."""

SAMPLE = 16

FLUSH_S = 1.0
"""What a killed actor's trace may lack."""

BUFFERED = 256
"""Lines gathered before they are written, so that a line costs no system call."""


class TraceSpan:
    """One piece of work, from entering to leaving its `with` block. Its `args` may be added to meanwhile."""

    __slots__ = ("_began", "_category", "_lane", "_name", "_task", "_trace", "args")

    def __init__(self, trace: "Trace", name: str, category: str, args: dict[str, Any]) -> None:
        self._trace, self._name, self._category = trace, name, category
        self._began = 0.0
        self._lane = self._task = 0
        self.args = args

    def __enter__(self) -> "TraceSpan":
        self._task, self._lane = self._trace.enter_lane()
        self._began = self._trace.now_us()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._trace.leave_lane(self._task)
        if kind is not None:
            self.args["raised"] = kind.__name__
        self._trace.add(self._name, self._category, self._began, self._lane, self.args)


class Trace:
    """The spans of one actor, on its loop; `Trace(None)` keeps none and costs next to nothing.

    Spans of one task nest; those of tasks that overlap are drawn in lanes beside each other. Past `SAMPLED_FROM` of
    `MAX_BYTES` spans are sampled, past all of it dropped, and `close` notes how many are missing.
    """

    def __init__(self, path: Path | None, *, max_bytes: int = MAX_BYTES) -> None:
        self._sink = JsonLines(path, max_bytes=max_bytes) if path is not None else None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._offset_s = 0.0
        self._flushed_s = 0.0
        self._seen = 0
        self._skipped = 0
        self._lanes: dict[int, tuple[int, int]] = {}
        self._free: list[int] = []
        self._num_lanes = 0

    def span(self, name: str, category: str = "", **args: Any) -> TraceSpan:
        """`with trace.span("train_step", step=3):` around the work; `args` must be plain values."""
        return TraceSpan(self, name, category, args)

    def close(self) -> None:
        """Write out what is held, and how much is missing."""
        if self._sink is None:
            return
        missing = self._skipped + self._sink.dropped
        if missing:
            self._sink.max_bytes += 1024
            note = {"ph": "i", "s": "p", "name": f"{missing} spans are not shown", "ts": self.now_us(), "tid": 0}
            self._sink.close()
            self._sink.write(note)
        self._sink.close()

    def now_us(self) -> float:
        """Microseconds since the epoch, going on evenly with the loop's clock (from 0 where time is virtual)."""
        if self._sink is None:
            return 0.0
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._offset_s = 0.0 if getattr(self._loop, "virtual", False) else wall_s() - self._loop.time()
        return (self._loop.time() + self._offset_s) * 1e6

    def enter_lane(self) -> tuple[int, int]:
        """(task, lane): the lane of the present task's outermost span; a free one where this is the outermost."""
        if self._sink is None:
            return 0, 0
        task = id(asyncio.current_task())
        lane, depth = self._lanes.get(task, (-1, 0))
        if lane < 0:
            lane = heapq.heappop(self._free) if self._free else self._num_lanes
            self._num_lanes = max(self._num_lanes, lane + 1)
        self._lanes[task] = (lane, depth + 1)
        return task, lane

    def leave_lane(self, task: int) -> None:
        """Undo one `enter_lane` that returned `task`."""
        if self._sink is None:
            return
        lane, depth = self._lanes.pop(task)
        if depth > 1:
            self._lanes[task] = (lane, depth - 1)
        else:
            heapq.heappush(self._free, lane)

    def add(self, name: str, category: str, began_us: float, lane: int, args: dict[str, Any]) -> None:
        """Note a span that began at `began_us` and ends now."""
        if self._sink is None:
            return
        self._seen += 1
        if self._sink.fill > SAMPLED_FROM and self._seen % SAMPLE:
            self._skipped += 1
            return
        now = self.now_us()
        self._sink.write(
            {"ph": "X", "name": name, "cat": category, "ts": began_us, "dur": now - began_us, "tid": lane, "args": args}
        )
        if now - self._flushed_s * 1e6 > FLUSH_S * 1e6:
            self._flushed_s = now / 1e6
            self._sink.flush()


def trace_path(run_folder: Path, actor: str) -> Path:
    """Where `actor` writes its spans."""
    return run_folder / "trace" / f"{actor}.jsonl"


def merge_traces(run_folder: Path) -> Path | None:
    """Write `trace.json` in the run folder from all actors' spans, as Chrome's JSON format; None where there are none.

    Blocking. Lines that a killed actor left half written are skipped. Replaces an earlier trace.json at once.
    """
    files = sorted((run_folder / "trace").glob("*.jsonl"))
    if not files:
        return None
    made, final = run_folder / "trace.json.tmp", run_folder / "trace.json"
    with made.open("wb") as out:
        out.write(b'{"displayTimeUnit":"ms","traceEvents":[\n')
        for number, file in enumerate(files, 1):
            name = {"ph": "M", "name": "process_name", "pid": number, "tid": 0, "args": {"name": file.stem}}
            out.write((b",\n" if number > 1 else b"") + msgspec.json.encode(name))
            for line in _whole_lines(file):
                out.write(b',\n{"pid":%d,' % number + line[1:])
        out.write(b"\n]}\n")
    made.replace(final)
    return final


def _whole_lines(file: Path) -> Iterator[bytes]:
    with file.open("rb") as lines:
        for raw in lines:
            line = raw.strip()
            try:
                whole = isinstance(msgspec.json.decode(line), dict)
            except msgspec.DecodeError:
                continue
            if whole:
                yield line


class JsonLines:
    """Appends one JSON object per line to `path`, up to `max_bytes` in all, an earlier process's lines included.

    At the limit `write` says False and drops the line; `dropped` counts them. Opened at the first line. A line that a killed
    process left half written is closed off, never continued.
    """

    def __init__(self, path: Path, *, max_bytes: int) -> None:
        self._path = path
        self._left = max_bytes
        self._lines: list[bytes] = []
        self._file: IO[bytes] | None = None
        self.max_bytes = max_bytes
        self.dropped = 0

    @property
    def fill(self) -> float:
        """Share of the limit that is used, 0 to 1."""
        return 1.0 - max(0, self._left) / self.max_bytes

    def write(self, row: object) -> bool:
        """Take one row; it is on its way to the file after `flush`, or after `BUFFERED` rows."""
        if self._file is None:
            self._open()
        line = msgspec.json.encode(row) + b"\n"
        if len(line) > self._left:
            self.dropped += 1
            return False
        self._left -= len(line)
        self._lines.append(line)
        if len(self._lines) >= BUFFERED:
            self.flush()
        return True

    def flush(self) -> None:
        """Hand gathered lines to the operating system."""
        if self._lines and self._file is not None:
            self._file.write(b"".join(self._lines))
            self._file.flush()
            self._lines.clear()

    def close(self) -> None:
        """Flush and close; a later `write` opens the file again."""
        self.flush()
        if self._file is not None:
            self._file.close()
            self._file = None

    def _open(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self._path.open("ab+")
        size = self._file.seek(0, os.SEEK_END)
        self._left = self.max_bytes - size
        if size:
            self._file.seek(-1, os.SEEK_END)
            if self._file.read(1) != b"\n":
                self._lines.append(b"\n")
