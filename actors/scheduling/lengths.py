"""What the orchestrator knows of lengths: those that ended, step by step, and from them what running requests still have to sample."""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence

from actors.messages.orchestration import RequestEnded, RequestSeen
from planning.forecast import WINDOW, Forecast, Seen, fit

STEPS_KEPT = 2 * WINDOW
"""Requests of one prompt are compared over so many steps."""


class Lengths:
    """A step is what asks for the same weights, or ends before nothing of it runs any more."""

    known = False
    """Each request's own length, instead of how lengths are distributed."""

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

    def left(self, requests: Iterable[RequestSeen]) -> Mapping[str, float]:
        """Tokens that each of the running `requests` has still to sample, on average: which of them is long shows only as they run."""
        running = list(requests)
        forecast = self._forecast(running)
        return {each.request_id: _within(each, forecast.expected(_seen(each))) for each in running}

    def drawn(self, requests: Iterable[RequestSeen]) -> Mapping[str, float] | None:
        """Tokens to come of all that runs, spread as lengths are, so that their tail is among them; None where no length is known."""
        by_name = {each.request_id: each for each in requests}
        forecast = self._forecast(by_name.values())
        if not forecast.curves:
            return None
        spread = forecast.spread({name: _seen(each) for name, each in by_name.items()})
        return {name: _within(each, spread[name]) for name, each in by_name.items()}

    def _forecast(self, running: Iterable[RequestSeen]) -> Forecast:
        return fit(tuple(self._steps), (*self._now, *map(_seen, running)))


def _within(request: RequestSeen, left: float) -> float:
    return max(1.0, min(left, request.limit - request.sampled))


def _seen(request: RequestSeen) -> Seen:
    return Seen(request.task, str(request.prompt), request.sampled, done=False)
