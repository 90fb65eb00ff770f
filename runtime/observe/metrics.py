"""Figures of one actor: counts, gauges, recent distributions and the idle share; and the CPU seconds of processes, read from /proc."""

import asyncio
import math
import os
from collections import Counter, deque
from collections.abc import Callable, Container, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

WINDOW_S = 10.0
"""The idle share looks back this far: long enough to smooth over one training step, short enough to be live."""

RECENT = 1024
"""Values kept per distribution: exact percentiles of the newest, a p99 from ten values, sorted in well under a millisecond."""

MAX_NAMES = 512
"""Names per actor. A new name above it is dropped and counted under `metrics/names_dropped`: a snapshot goes out each second."""

LAG_PERIOD_S = 0.1
"""Period of the loop-lag probe: ten wake-ups a second cost nothing and still catch a 50 ms stall."""

LATE_SAMPLES = 20
"""Two seconds of samples; the second worst counts, so that one hiccup says nothing about the process."""

PROC = Path("/proc")


class Metrics:
    """Figures of one actor. Belongs to the loop's thread; only `observe` and `gauge` may be called from another.

    Values that are not finite are never stored; they are counted under `metrics/not_finite`.
    """

    def __init__(self) -> None:
        self._values: dict[str, float] = {}
        self._recent: dict[str, deque[float]] = {}
        self._busy_depth = 0
        self._busy_since = 0.0
        self._busy_s = 0.0
        self._time: Callable[[], float] | None = None
        self._started: float | None = None
        self._marks: deque[tuple[float, float]] = deque()

    def count(self, name: str, n: float = 1) -> None:
        """Add `n` to the running total `name`."""
        if self._accepts(name, n, self._values):
            self._values[name] = self._values.get(name, 0.0) + n

    def gauge(self, name: str, value: float) -> None:
        """Set `name` to its present value."""
        if self._accepts(name, value, self._values):
            self._values[name] = float(value)

    def observe(self, name: str, value: float) -> None:
        """Add one value to the distribution `name`; the newest `RECENT` make `name_p50`, `name_p99`, `name_mean`, `name_max`."""
        if self._accepts(name, value, self._recent):
            recent = self._recent.get(name)
            if recent is None:
                recent = self._recent.setdefault(name, deque(maxlen=RECENT))
            recent.append(float(value))

    @contextmanager
    def busy(self) -> Generator[None, None, None]:
        """Time spent inside, in any task, counts as busy; overlapping and nested uses count once."""
        self._tick()
        if self._busy_depth == 0:
            self._busy_since = self._now()
        self._busy_depth += 1
        try:
            yield
        finally:
            self._busy_depth -= 1
            if self._busy_depth == 0:
                self._busy_s += self._now() - self._busy_since

    def idle(self) -> float:
        """Share of about the last `WINDOW_S` seconds spent outside `busy()`, 0 to 1; the marks move on at each call."""
        now, busy_s = self._tick()
        since, busy_then = self._marks[0]
        return _idle_share(now - since, busy_s - busy_then)

    def snapshot(self) -> dict[str, float]:
        """Everything by name: totals, gauges, `_p50 _p99 _mean _max` of distributions, `idle` and `idle_total` (whole life)."""
        found = dict(self._values)
        for name, recent in self._recent.items():
            values = sorted(recent)
            found[f"{name}_p50"] = percentile(values, 0.50)
            found[f"{name}_p99"] = percentile(values, 0.99)
            found[f"{name}_mean"] = math.fsum(values) / len(values)
            found[f"{name}_max"] = values[-1]
        found["idle"] = self.idle()
        now, busy_s = self._tick()
        found["idle_total"] = _idle_share(now - (self._started or 0.0), busy_s)
        return found

    def _accepts(self, name: str, value: float, names: dict[str, float] | dict[str, deque[float]]) -> bool:
        if not math.isfinite(value):
            self._values["metrics/not_finite"] = self._values.get("metrics/not_finite", 0.0) + 1
            return False
        if name not in names and len(self._values) + len(self._recent) >= MAX_NAMES:
            self._values["metrics/names_dropped"] = self._values.get("metrics/names_dropped", 0.0) + 1
            return False
        return True

    def _now(self) -> float:
        if self._time is None:
            self._time = asyncio.get_running_loop().time
        return self._time()

    def _tick(self) -> tuple[float, float]:
        """(now, busy seconds so far), after dropping marks that fell out of the window and adding a due one."""
        now = self._now()
        busy_s = self._busy_s + (now - self._busy_since if self._busy_depth else 0.0)
        if self._started is None:
            self._started = now
        if not self._marks or now - self._marks[-1][0] >= WINDOW_S / 20:
            self._marks.append((now, busy_s))
        while len(self._marks) > 1 and self._marks[1][0] <= now - WINDOW_S:
            self._marks.popleft()
        return now, busy_s


def percentile(ordered: Sequence[float], share: float) -> float:
    """The value that `share` of the ascending, non-empty `ordered` do not exceed (nearest rank)."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


async def measure_loop_lag(metrics: Metrics) -> None:
    """Observe how late the loop wakes a sleeper, in ms, until cancelled: `loop/lag_p99` over minutes, `loop/late` the worst of late."""
    loop = asyncio.get_running_loop()
    newest: deque[float] = deque(maxlen=LATE_SAMPLES)
    while True:
        due = loop.time() + LAG_PERIOD_S
        await asyncio.sleep(LAG_PERIOD_S)
        lag_ms = max(0.0, loop.time() - due) * 1000.0
        newest.append(lag_ms)
        metrics.observe("loop/lag", lag_ms)
        metrics.gauge("loop/late", sorted(newest)[-2] if len(newest) > 1 else 0.0)


def _idle_share(span_s: float, busy_s: float) -> float:
    return 1.0 if span_s <= 0.0 else min(1.0, max(0.0, 1.0 - busy_s / span_s))


def cpu_seconds(pids: Mapping[str, int], proc: Path = PROC) -> dict[str, float]:
    """CPU seconds so far by name: each process with what it started, less what `pids` names itself. Blocking.

    The kernel counts in ticks of 10 ms; children that ended do not count. Left out is a process that is gone, names that share one
    process, and everything where the system has no /proc.
    """
    tick_s = 1.0 / os.sysconf("SC_CLK_TCK")
    named = Counter(pids.values())
    found: dict[str, float] = {}
    for name, pid in pids.items():
        ticks = _ticks(pid, proc) if named[pid] == 1 else None
        if ticks is not None:
            found[name] = tick_s * (ticks + sum(_ticks(child, proc) or 0 for child in _below(pid, named, proc)))
    return found


def busy_seconds(proc: Path = PROC) -> float | None:
    """CPU seconds that all cores of this host were busy so far, whoever used them; None where the system does not tell."""
    try:
        first = (proc / "stat").read_text().splitlines()[0].split()
        user, nice, system, _, _, irq, softirq = (int(cell) for cell in first[1:8])
    except (OSError, ValueError, IndexError):
        return None
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def _ticks(pid: int, proc: Path) -> int | None:
    try:
        cells = (proc / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()
        return int(cells[11]) + int(cells[12])  # utime and stime, fields 14 and 15 of proc(5)
    except (OSError, ValueError, IndexError):
        return None


def _below(pid: int, named: Container[int], proc: Path) -> Iterator[int]:
    """All descendants of `pid` that lead through none of `named`."""
    for file in (proc / str(pid) / "task").glob("*/children"):
        try:
            children = [int(child) for child in file.read_text().split()]
        except (OSError, ValueError):
            continue
        for child in children:
            if child not in named:
                yield child
                yield from _below(child, named, proc)
