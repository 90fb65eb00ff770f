"""When to change circuits: the rhythm of the job's phases, what the fabric works towards next, and how long changes take."""

import asyncio
from collections import deque
from statistics import median
from typing import NamedTuple

from rubato.planning.demand import Links
from rubato.runtime.observe.figures import Metrics

KEPT = 5
"""Durations remembered per phase: a median of five follows a change within three iterations and shrugs off two outliers."""


class ExpectedPhase(NamedTuple):
    """The phase to come, and the loop time at which it should begin."""

    phase: str
    at: float


class Rhythm:
    """Phases follow each other; each lasts until the next begins. Times are loop times."""

    def __init__(self) -> None:
        self.phase = ""
        """The one that runs; empty before the first."""
        self.since = 0.0
        self._durations: dict[str, deque[float]] = {}
        self._next: dict[str, str] = {}

    def began(self, phase: str, at: float) -> None:
        """`phase` began at `at`, which ends the one before. The same phase again is its next round."""
        if self.phase:
            self._durations.setdefault(self.phase, deque(maxlen=KEPT)).append(at - self.since)
            self._next[self.phase] = phase
        self.phase, self.since = phase, at

    def lasts(self, phase: str) -> float | None:
        """Seconds that `phase` usually lasts; None while it never ended."""
        durations = self._durations.get(phase)
        return median(durations) if durations else None

    def next(self) -> ExpectedPhase | None:
        """What should follow the phase that runs; None in the first iteration."""
        follower, lasts = self._next.get(self.phase), self.lasts(self.phase)
        return None if follower is None or lasts is None else ExpectedPhase(follower, self.since + lasts)

    def cycle(self) -> tuple[str, ...]:
        """The phases from the one that runs until it comes again; empty while that is not known, or a duration in it is not."""
        phases = [self.phase]
        while (follower := self._next.get(phases[-1])) is not None and follower not in phases:
            phases.append(follower)
        closed = follower == self.phase and all(self._durations.get(phase) for phase in phases)
        return tuple(phases) if closed else ()


class Aim(NamedTuple):
    """Circuits to work towards: those of `phase`, beginning the change at `due` (times are loop times)."""

    phase: str
    due: float
    starts_at: float
    """When the phase began, or is expected to."""
    restore: bool = False
    """The switch lost its circuits: however short the phase, it needs a connected fabric."""
    links: Links | None = None
    """Not those of the phase's template, but these."""
    asked: int = -1
    """The number of the ask."""
    window: bool = False
    """They are for a window of the phase that runs: the schedule has weighed the change."""


class Aims:
    """A new aim replaces the one of its kind."""

    def __init__(self) -> None:
        self.present: Aim | None = None
        self.coming: Aim | None = None
        self._within: list[Aim] = []
        self._changed = asyncio.Event()

    def now(self, aim: Aim) -> None:
        self.present = aim
        self._changed.set()

    def later(self, aim: Aim) -> None:
        self.coming = aim
        self._changed.set()

    def within(self, aims: list[Aim]) -> None:
        """Changes between the windows of the phase that begins, in the place of the last one's."""
        self._within = aims
        self._changed.set()

    async def next(self) -> Aim:
        """Waits until an aim is due, and takes it. Circuits for the phase to come end the windows of the one that runs."""
        while True:
            self._changed.clear()
            aim = min((a for a in (self.present, self.coming, *self._within[:1]) if a), key=lambda a: a.due, default=None)
            try:
                async with asyncio.timeout_at(aim.due if aim else None):
                    await self._changed.wait()
            except TimeoutError:
                if aim is not None and aim is self.present:
                    self.present = None
                    return aim
                if aim is not None and aim is self.coming:
                    self.coming, self._within = None, []
                    return aim
                if aim is not None and self._within and aim is self._within[0]:
                    return self._take_latest()

    def _take_latest(self) -> Aim:
        """Of the windows whose time has come."""
        now = asyncio.get_running_loop().time()
        aim = self._within.pop(0)
        while self._within and self._within[0].due <= now:
            aim = self._within.pop(0)
        return aim


REMEMBERED = 5
"""Changes that the expected delay is the longest of: one slow change makes the next ones begin early, for five rounds."""


class Accounts:
    """Totals since start, which are metrics. Times are loop times."""

    def __init__(self, metrics: Metrics, reconfiguration_s: float) -> None:
        self._metrics = metrics
        self._delays: deque[float] = deque([reconfiguration_s], maxlen=REMEMBERED)

    @property
    def delay_s(self) -> float:
        """What a change is expected to take."""
        return max(self._delays)

    def changed(self, starts_at: float, began: float, began_meanwhile: float | None) -> None:
        """A change that began at `began` is done, for a phase that was expected at `starts_at` or began during the change.

        What passed before its phase began was hidden; what the phase then waited for is exposed.
        """
        ended = asyncio.get_running_loop().time()
        phase_began = starts_at if starts_at <= began else began_meanwhile if began_meanwhile is not None else ended
        hidden_s, exposed_s = max(0.0, min(phase_began, ended) - began), max(0.0, ended - phase_began)
        self._delays.append(ended - began)
        self._metrics.count("fabric/reconfigurations")
        self._metrics.count("fabric/hidden_s", hidden_s)
        self._metrics.count("fabric/exposed_s", exposed_s)
