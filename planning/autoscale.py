"""How many workers a pool should have that grows and shrinks with its load, from none: for stateless calls, such as rewards.

It grows at once and shrinks late. A call that waits is worth a new worker unless those that are there are through with it before a new
one could begin. A worker that is not needed is kept for as long as several starts take: ending one that is wanted again soon costs
a start, and keeping one costs its idling, so what is kept until both are alike costs at most twice what foresight would (the
ski-rental bound; Karlin et al., "Competitive snoopy caching", Algorithmica 3, 1988, section 2). KEPT_STARTS sets the price of a start above
its time alone, for calls wait meanwhile.
"""

import math
from collections import deque
from typing import NamedTuple

UTILISATION = 0.8
"""Share of a worker's time that a steady load may take: nearer to 1 queues grow without bound (M/M/n)."""

KEPT_STARTS = 10
"""A worker is kept idle for as long as so many starts take."""

FIRST_START_S = 1.0
"""What a start is taken to last before one was seen."""

LEAST_START_S = 0.1
"""What a start counts at least, so that looks are never closer than a second."""

RECENT = 64
"""Arrivals and calls that figures are taken from."""


class PoolBounds(NamedTuple):
    """Fewest and most workers: 0 ≤ least ≤ most, 1 ≤ most."""

    least: int
    most: int


class PoolLoad(NamedTuple):
    """A pool at one moment. Times in seconds."""

    now_s: float
    waiting: int
    """Calls without a worker."""
    running: int
    """Calls that have one; a worker has one call at a time."""
    workers: int
    """Those that serve and those that start."""
    rate_hz: float
    """Calls that arrived per second lately."""
    service_s: float | None
    """What a call takes once it has a worker; None before one was seen."""
    start_s: float
    """From deciding on a worker to its first call."""


class WorkersWanted(NamedTuple):
    """The plan."""

    workers: int
    why: str
    again_s: float | None = None
    """Plan again then even if nothing happens; None: only when something does."""
    peak: int = 0
    """Most that were needed since there was one too many; it shrinks to that."""


def autoscale(load: PoolLoad, bounds: PoolBounds, before: WorkersWanted) -> WorkersWanted:
    """Workers to have from now on, given what was planned `before`.

    Always within bounds; at least one where a call waits or runs. As many as calls need are there at once; fewer only when fewer were needed
    at every look for KEPT_STARTS starts.
    """
    needed, why = _needed(load)
    keep_s = KEPT_STARTS * max(load.start_s, LEAST_START_S)
    needed = min(max(needed, bounds.least), bounds.most)
    have = min(max(load.workers, bounds.least), bounds.most)
    if needed >= have:
        # A steady rate fades without an event, so what rests on it is looked at again.
        again_s = load.now_s + keep_s if needed > bounds.least else None
        return WorkersWanted(needed, why, again_s, needed)
    if before.again_s is None or before.peak >= have:  # one too many as of now
        return WorkersWanted(have, f"{why}; {have} are kept for a while", load.now_s + keep_s, needed)
    peak = max(before.peak, needed)
    if load.now_s < before.again_s:
        return WorkersWanted(have, f"{why}; {have} are kept for a while", before.again_s, peak)
    again_s = load.now_s + keep_s if peak > bounds.least else None
    return WorkersWanted(peak, f"no more than {peak} were needed for {KEPT_STARTS} starts", again_s, needed)


def _needed(load: PoolLoad) -> tuple[int, str]:
    calls = load.waiting + load.running
    if load.service_s is None:
        return calls, f"{calls} calls, of a length that is not known yet"
    # Little's law: rate · service workers are busy on average. Less than one is left to the calls themselves, so that a pool can be empty.
    steady = load.rate_hz * load.service_s / UTILISATION
    steady = math.ceil(steady) if steady >= 1 else 0
    # A worker that starts now takes part of a queue only where that lasts longer than the start.
    lasts_s = max(load.service_s, load.start_s)
    pressing = math.ceil(calls * load.service_s / lasts_s) if lasts_s else calls
    why = f"{calls} calls of {load.service_s:.2g} s, {load.rate_hz:.3g} a second"
    return max(steady, pressing, min(calls, 1)), why


class PoolMeter:
    """Arrivals, lengths of calls and of starts, as they were lately; times come from the caller."""

    def __init__(self) -> None:
        self._arrivals: deque[float] = deque(maxlen=RECENT)
        self._service: deque[float] = deque(maxlen=RECENT)
        self._starts: deque[float] = deque(maxlen=RECENT)

    def arrived(self, now_s: float) -> None:
        """A call came."""
        self._arrivals.append(now_s)

    def served(self, seconds: float) -> None:
        """A call had a worker for so long."""
        self._service.append(seconds)

    def started(self, seconds: float) -> None:
        """A worker was ready after so long."""
        self._starts.append(seconds)

    def load(self, now_s: float, *, waiting: int, running: int, workers: int) -> PoolLoad:
        """As of now. The rate is over the last RECENT arrivals or KEPT_STARTS starts, whichever is shorter."""
        start_s = _mean(self._starts, FIRST_START_S)
        window_s = KEPT_STARTS * start_s
        since = [at for at in self._arrivals if at > now_s - window_s]
        span_s = window_s if len(since) < RECENT else now_s - since[0]
        rate_hz = len(since) / span_s if span_s > 0 else 0.0
        service_s = _mean(self._service, -1.0)
        return PoolLoad(now_s, waiting, running, workers, rate_hz, None if service_s < 0 else service_s, start_s)


def _mean(values: deque[float], otherwise: float) -> float:
    return math.fsum(values) / len(values) if values else otherwise
