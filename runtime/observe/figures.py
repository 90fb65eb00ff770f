"""What one actor publishes of itself each second: figures (counts, gauges, recent distributions, the idle share), and who waits for what.

Each wait in progress says what for, on whom and up to which limit; each stage, how long that usually takes. Besides, the CPU seconds of
processes, read from /proc.
"""

import asyncio
import math
import os
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Container, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

import msgspec

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
    """CPU seconds that all cores of this host were busy so far, for this job or not; None where the system does not tell."""
    try:
        first = (proc / "stat").read_text().splitlines()[0].split()
        user, nice, system, _, _, irq, softirq = (int(cell) for cell in first[1:8])
    except (OSError, ValueError, IndexError):
        return None
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def _ticks(pid: int, proc: Path) -> int | None:
    try:
        cells = _told(f"{proc}/{pid}/stat").rpartition(")")[2].split()
        return int(cells[11]) + int(cells[12])  # utime and stime, fields 14 and 15 of proc(5)
    except (OSError, ValueError, IndexError):
        return None


def _below(pid: int, named: Container[int], proc: Path) -> Iterator[int]:
    """All descendants of `pid` that lead through none of `named`."""
    tasks = f"{proc}/{pid}/task"
    with suppress(OSError):
        for task in os.listdir(tasks):
            for child in _children(f"{tasks}/{task}/children"):
                if child not in named:
                    yield child
                    yield from _below(child, named, proc)


def _children(file: str) -> list[int]:
    """Of one thread, which may be gone by now."""
    with suppress(OSError, ValueError):
        return [int(child) for child in _told(file).split()]
    return []


def _told(file: str) -> str:
    """What one of /proc says. By its name as text: a Path interns each of its parts, of which the numbers are new every time."""
    with open(file, errors="replace") as opened:
        return opened.read()


# -- waits -----------------------------------------------------------------------------------------------------

MAX_VIEWS = 48
"""Waits shown per actor: an actor may hold hundreds, and its status is written each second."""

SHOWN_PER_STAGE = 4
"""The oldest of each stage are always among them, so that a crowd in one stage hides no other."""

LOAD_S = 5.0
"""Loads are means over the last so many seconds: live, and longer than most single waits."""

KEPT = 256
"""Ended waits remembered per stage; where more ended within `LOAD_S`, the load is the mean over those."""

MAX_STAGES = 64
"""Pairs of stage and holder remembered per actor; the one that was used longest ago is forgotten first."""

REFUSAL_S = 3.0
"""A refusal is shown until the holder answers, or for this long after the last one: pauses between tries are shorter."""

ITSELF = "itself"
"""Stands for the waiting actor where a holder is named: another stage of its own."""

STORE = "store"
"""Stands for the Store where a holder is named: it is no actor, but may be waited for like one."""

CLUSTER_STORE, OTHER_JOB = "the cluster's Store", "another job"
"""The same for the Store of the cluster that jobs share, while it does not answer, and for who has what a job waits for there."""


class WaitView(msgspec.Struct, frozen=True):
    """One wait in progress, as others see it. `limit` is the config key and value that ends it, where there is one."""

    what: str
    detail: str = ""
    holder: str = ""
    """An actor, a role (any of its instances), STORE, ITSELF, or empty: what this very stage does."""
    age_s: float = 0.0
    limit: str = ""
    stage: str = ""
    quiet_s: float = 0.0
    """Since it last moved; its age where it never did."""
    blocks_actor: bool = msgspec.field(default=False, name="whole")
    """Whether the actor does nothing else meanwhile: all that waits for it waits for this. `monitor --json` calls it `whole`."""


class StageView(msgspec.Struct, frozen=True, omit_defaults=True):
    """All waits of one stage for one holder."""

    stage: str
    holder: str = ""
    num: int = 0
    """In progress."""
    load: float = 0.0
    """In progress on average over the last `LOAD_S` seconds."""
    longest_s: float = -1.0
    """The longest that one of the newest `KEPT` took, or stood still; -1 where none ended or moved yet."""
    idle: bool = False
    """Waits for more work: it holds nothing up that is in hand."""


class _Stage:
    """What is remembered of one stage and holder."""

    __slots__ = ("ended", "gaps", "idle")

    def __init__(self, *, idle: bool) -> None:
        self.idle = idle
        self.ended: deque[tuple[float, float]] = deque(maxlen=KEPT)
        """(began, ended), loop times."""
        self.gaps: deque[float] = deque(maxlen=KEPT)

    def load(self, since: float, now: float) -> float:
        """Waits that ended since then, as a mean over the time between."""
        if len(self.ended) == KEPT:
            since = max(since, self.ended[0][1])
        lately = takewhile(lambda wait: wait[1] > since, reversed(self.ended))
        return sum(end - max(begin, since) for begin, end in lately) / max(now - since, 1e-9)


@dataclass(slots=True, eq=False)
class Wait:
    """One wait, from entering to leaving its `with` block, or from `open` to `close`."""

    _owner: "Waits"
    what: str
    stage: str
    detail: str
    holder: str
    limit: str
    blocks_actor: bool
    idle: bool
    since: float = 0.0
    _moved: float = 0.0
    _describe: Callable[[], tuple[str, str]] | None = None

    def described_by(self, describe: Callable[[], tuple[str, str]]) -> "Wait":
        """Ask `describe` for (detail, holder) whenever the wait is read, where these change more often than that."""
        self._describe = describe
        return self

    def update(self, *, detail: str | None = None, holder: str | None = None) -> None:
        """Say more about the wait while it lasts."""
        self.detail = self.detail if detail is None else detail
        self.holder = self.holder if holder is None else holder

    def moved(self) -> None:
        """What is waited for makes progress."""
        now = self._owner.now()
        self._owner.stage(self).gaps.append(now - self._moved)
        self._moved = now

    def view(self, now: float) -> WaitView:
        """The wait at loop time `now`."""
        if self._describe is not None:
            self.detail, self.holder = self._describe()
        age_s, quiet_s = max(0.0, now - self.since), max(0.0, now - self._moved)
        return WaitView(self.what, self.detail, self.holder, age_s, self.limit, self.stage, quiet_s, self.blocks_actor)

    def open(self) -> "Wait":
        """Begin, where a `with` block does not fit."""
        self.since = self._moved = self._owner.now()
        self._owner.open[id(self)] = self
        return self

    def close(self) -> None:
        """End it; once is enough."""
        if self._owner.open.pop(id(self), None) is not None:
            held, now = self._owner.stage(self), self._owner.now()
            held.ended.append((self.since, now))
            held.gaps.append(max(0.0, now - self._moved))

    def __enter__(self) -> "Wait":
        return self.open()

    def __exit__(self, *_: object) -> None:
        self.close()


class Waits:
    """The waits of one actor."""

    def __init__(self) -> None:
        self.open: dict[int, Wait] = {}
        """Waits in progress, in the order they began."""
        self._time: Callable[[], float] | None = None
        self._born = 0.0
        self._stages: OrderedDict[tuple[str, str], _Stage] = OrderedDict()
        self.refusals: dict[str, tuple[str, str, float, float, float]] = {}
        """Holder → (what it refused, why, first and last time, until when it is shown)."""

    def on(
        self,
        what: str,
        *,
        stage: str = "",
        detail: str = "",
        holder: str = "",
        limit: str = "",
        blocks_actor: bool = False,
        idle: bool = False,
    ) -> Wait:
        """`with waits.on("batch 42", stage="batch", detail="29 of 32 groups", holder="sample_buffer") as wait:` around the awaiting.

        `stage` names the kind of waiting, `what` the one thing (it is the stage where none is given).
        """
        return Wait(self, what, stage or what, detail, holder, limit, blocks_actor, idle)

    def now(self) -> float:
        """Loop time; the loop is the one of the first wait, so that a wait may end after its loop did."""
        if self._time is None:
            self._time = asyncio.get_running_loop().time
            self._born = self._time()
        return self._time()

    def refused(self, holder: str, what: str, why: str, *, for_s: float = REFUSAL_S) -> None:
        """`holder` did not take `what`; shown until it answers, or for `for_s`."""
        now = self.now()
        first = self.refusals[holder][2] if holder in self.refusals else now
        self.refusals[holder] = (what, why, first, now, now + for_s)

    def answered(self, holder: str) -> None:
        """`holder` takes what it is given (again)."""
        self.refusals.pop(holder, None)

    def snapshot(self, now: float, more: Sequence[WaitView] = ()) -> list[WaitView]:
        """At most `MAX_VIEWS` waits at loop time `now`, those of `more` included, oldest first."""
        views = [wait.view(now) for wait in self.open.values()]
        views += [
            WaitView(what, why, holder, now - first, "", "refused", now - last)
            for holder, (what, why, first, last, until) in self.refusals.items()
            if now <= until
        ]
        views += more
        views.sort(key=lambda view: -view.age_s)
        return _thinned(views) if len(views) > MAX_VIEWS else views

    def stages(self, now: float) -> list[StageView]:
        """Every stage that was used lately, at loop time `now`."""
        since = max(now - LOAD_S, min(self._born, now - 1e-9))
        shares: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
        for wait in self.open.values():
            self.stage(wait)
            shares[wait.stage, wait.holder].append((now - max(since, wait.since)) / (now - since))
        views: list[StageView] = []
        for key, held in self._stages.items():
            load = round(sum(shares[key]) + held.load(since, now), 4)
            views.append(StageView(*key, len(shares[key]), load, max(held.gaps, default=-1.0), held.idle))
        return views

    def stage(self, wait: Wait) -> _Stage:
        key = (wait.stage, wait.holder)
        found = self._stages.get(key)
        if found is None:
            found = self._stages[key] = _Stage(idle=wait.idle)
            if len(self._stages) > MAX_STAGES:
                self._stages.popitem(last=False)
        else:
            self._stages.move_to_end(key)
        return found


def _thinned(views: list[WaitView]) -> list[WaitView]:
    """The oldest of each stage, then the oldest of all, oldest first."""
    seen: dict[tuple[str, str], int] = {}
    first: list[WaitView] = []
    rest: list[WaitView] = []
    for view in views:
        key = (view.stage, view.holder)
        seen[key] = seen.get(key, 0) + 1
        (first if seen[key] <= SHOWN_PER_STAGE else rest).append(view)
    return sorted([*first, *rest][:MAX_VIEWS], key=lambda view: -view.age_s)
