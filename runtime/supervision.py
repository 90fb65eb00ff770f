"""How often a crashed actor is started again, and when its failure becomes the job's. Pure: time is an argument."""

from collections import deque
from typing import NamedTuple


class RestartPlan(NamedTuple):
    """Restart after `delay_s` (the `attempt`-th within the window), or escalate when `delay_s` is None."""

    delay_s: float | None
    attempt: int


class RestartBudget:
    """At most `limit` restarts within any `window_s`; the delay doubles from `first_s` with each of them."""

    def __init__(self, limit: int, window_s: float, first_s: float = 0.5, longest_s: float = 8.0) -> None:
        self._limit, self._window_s = limit, window_s
        self._first_s, self._longest_s = first_s, longest_s
        self._deaths: deque[float] = deque(maxlen=max(1, limit + 1))

    def died(self, now: float) -> RestartPlan:
        """Note a death at `now` (seconds, any monotonic clock) and say what follows."""
        while self._deaths and self._deaths[0] <= now - self._window_s:
            self._deaths.popleft()
        self._deaths.append(now)
        attempt = len(self._deaths)
        if attempt > self._limit:
            return RestartPlan(None, attempt)
        return RestartPlan(min(self._longest_s, self._first_s * 2 ** (attempt - 1)), attempt)
