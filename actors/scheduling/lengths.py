"""What the orchestrator knows of lengths: those that ended, step by step, and from them what running requests still have to sample."""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from actors.messages.orchestration import RequestEnded, RequestSeen
from planning.forecast import WINDOW, Forecast, Seen, fit

STEPS_KEPT = 2 * WINDOW
"""Requests of one prompt are compared over so many steps."""

QUANTILE = 0.7
"""That of the mean of a log-normal distribution whose deviation is about 1, as those of configs/lengths are.

It was chosen on seeds 0 to 4 of the load *rebalance* of tools/bench/orchestrator.py, on which 71 % of the oracle's gain are reached; on
seeds 5 to 9, which it was not chosen on, 52 % are (docs/orchestrrl.md).
"""


class Expected(NamedTuple):
    """Tokens that each request has still to sample, and how unsure the forecast is of them (`Forecast.unsure`)."""

    tokens: Mapping[str, float]
    unsure: float


class Lengths:
    """A step is what asks for the same weights, or ends before nothing of it runs any more."""

    def __init__(self) -> None:
        self._steps: deque[tuple[Seen, ...]] = deque(maxlen=STEPS_KEPT)
        self._now: list[Seen] = []
        self._version = -1
        self._running: frozenset[str] = frozenset()

    def note(self, ended: Sequence[RequestEnded], running: Sequence[RequestSeen]) -> bool:
        """What ended since the last call, and what runs now. Returns whether all that runs is new: a step begins."""
        version = max((each.version for each in (*ended, *running)), default=self._version)
        if version > self._version:
            self._close()
            self._version = version
        self._now += [Seen(each.task, str(each.prompt), each.sampled) for each in ended]
        names = frozenset(each.request_id for each in running)
        begins = self._running.isdisjoint(names)
        if begins:
            self._close()
        self._running = names
        return begins and bool(names)

    def _close(self) -> None:
        if self._now:
            self._steps.append(tuple(self._now))
            self._now = []

    def left(self, requests: Iterable[RequestSeen]) -> Expected:
        """Of each of the running `requests`, at one quantile for all: which of them is long shows only as they run."""
        running = list(requests)
        forecast = self._forecast(running)
        return Expected({each.request_id: _left(forecast, each) for each in running}, forecast.unsure)

    def drawn(self, requests: Iterable[RequestSeen]) -> Mapping[str, float] | None:
        """Tokens to come of all that runs, spread as lengths are, so that their tail is among them; None where no length is known."""
        by_name = {each.request_id: each for each in requests}
        forecast = self._forecast(by_name.values())
        if not forecast.curves:
            return None
        spread = forecast.spread({name: _seen(each) for name, each in by_name.items()})
        return {name: max(1.0, min(spread[name], each.limit - each.sampled)) for name, each in by_name.items()}

    def _forecast(self, running: Iterable[RequestSeen]) -> Forecast:
        return fit(tuple(self._steps), (*self._now, *map(_seen, running)))


def _left(forecast: Forecast, request: RequestSeen) -> float:
    left = forecast.remaining(_seen(request), QUANTILE).tokens
    return max(1.0, min(left, request.limit - request.sampled))


def _seen(request: RequestSeen) -> Seen:
    return Seen(request.task, str(request.prompt), request.sampled, done=False)
