"""Learns the rhythm of a job's phases: which follows which, how long each lasts, hence when the next begins."""

from collections import deque
from statistics import median
from typing import NamedTuple

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
