"""What the orchestrator knows of lengths: those that ended, step by step, and from them what is still to come, time in environments included.

What is forecast is a rollout, all turns of it, where a manager of environments tells of it; else a request.
"""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from rubato.actors.messages.orchestration import RequestEnded, RequestSeen, Surveyed, TrajectorySeen
from rubato.planning.forecast import WINDOW, Forecast, Over, Remaining, Seen, fit, over

STEPS_KEPT = 2 * WINDOW
"""Requests of one prompt are compared over so many steps."""

TOKENS_S = 30.0
"""What a rollout samples per second of its turns, while none has ended that told."""


class Expected(NamedTuple):
    """What each request has still to come."""

    left: Mapping[str, Remaining]
    """Of one request and the turns that follow it; in environments between those turns and after the last."""
    away_s: float = 0.0
    """Until the last is through of the rollouts that are in their environments."""


class Underway(NamedTuple):
    """A rollout, or a request that belongs to none, as far as it is."""

    name: str
    request: str
    """Of its turn; empty while it is in its environment."""
    version: int
    seen: Seen
    limit: float
    """Tokens that it may still sample."""


def underway(surveyed: Surveyed) -> list[Underway]:
    """All that was seen, each once."""
    rollouts = {each.session: each for each in surveyed.trajectories}
    asked = [_turn(each, rollouts.get(each.session)) for each in surveyed.requests]
    turns = {each.session for each in surveyed.requests}
    return asked + [_away(each) for each in rollouts.values() if each.session not in turns]


class _Step(NamedTuple):
    """One that is over; its requests that told took `generate_s` for `sampled` tokens."""

    over: Over
    sampled: int
    generate_s: float


class Lengths:
    """Lengths of requests, by step. A step ends when newer weights are asked for, or when none that ran at the last look is left."""

    known = False
    """Each request's own length, instead of how lengths are distributed."""

    def __init__(self) -> None:
        self._steps: deque[_Step] = deque(maxlen=STEPS_KEPT)
        self._now: list[RequestEnded] = []
        self._version = -1
        self._running: frozenset[str] = frozenset()

    def note(self, ended: Sequence[RequestEnded], running: Sequence[Underway]) -> bool:
        """What ended since the last call, and what is under way. Returns whether all of that is new: a step begins."""
        version = max((each.version for each in (*ended, *running)), default=self._version)
        if version > self._version:
            self._close()
            self._version = version
        self._now += ended
        names = frozenset(each.name for each in running)
        begins = self._running.isdisjoint(names)
        if begins:
            self._close()
        self._running = names
        return begins and bool(names)

    def _close(self) -> None:
        if self._now:
            done = over([each.over for each in self._steps], [*map(_whole, self._now)], tokens_s=self._tokens_s())
            self._steps.append(_Step(done, *_told(self._now)))
            self._now = []

    def left(self, running: Sequence[Underway]) -> Expected:
        """Of each that is under way, on average: which of them is long shows only as they run."""
        forecast = self._forecast(running)
        found = [(each, _within(forecast.expected(each.seen), each)) for each in running]
        away = (left.tokens / forecast.tokens_s + left.env_s for each, left in found if not each.request)
        return Expected({each.request: left for each, left in found if each.request}, max(away, default=0.0))

    def drawn(self, running: Sequence[Underway]) -> Mapping[str, Remaining] | None:
        """To come of each request, spread as lengths are, so that their tail is among them; None where no length is known."""
        forecast = self._forecast(running)
        if not forecast.curves:
            return None
        asked = {each.request: each for each in running if each.request}
        spread = forecast.spread({each.name: each.seen for each in asked.values()})
        return {request: _within(spread[each.name], each) for request, each in asked.items()}

    def _forecast(self, running: Iterable[Underway]) -> Forecast:
        now = [*map(_whole, self._now), *(each.seen for each in running)]
        return fit([each.over for each in self._steps], now, tokens_s=self._tokens_s())

    def _tokens_s(self) -> float:
        sampled, generate_s = _told(self._now)
        sampled += sum(each.sampled for each in self._steps)
        return sampled / (generate_s + sum(each.generate_s for each in self._steps)) if sampled else TOKENS_S


def _told(ended: Iterable[RequestEnded]) -> tuple[int, float]:
    """Tokens and seconds of the turns that reported their seconds."""
    known = [each for each in ended if each.generate_s > 0]
    return sum(each.sampled for each in known), sum(each.generate_s for each in known)


def _within(left: Remaining, each: Underway) -> Remaining:
    return left._replace(tokens=max(1.0, min(left.tokens, each.limit)))


def _whole(ended: RequestEnded) -> Seen:
    return Seen(ended.task, str(ended.prompt), ended.sampled, ended.env_s, ended.whole)


def _turn(request: RequestSeen, of: TrajectorySeen | None) -> Underway:
    """A request is a turn `of` a rollout, or all there is."""
    if of is None:
        seen = Seen(request.task, str(request.prompt), request.sampled, done=False)
        return Underway(request.request_id, request.request_id, request.version, seen, request.limit - request.sampled)
    sampled = of.sampled + request.sampled
    seen = Seen(of.task, str(of.prompt), sampled, of.env_s, done=False)
    return Underway(of.session, request.request_id, of.version, seen, of.limit - sampled)


def _away(of: TrajectorySeen) -> Underway:
    seen = Seen(of.task, str(of.prompt), of.sampled, of.env_s, done=False)
    return Underway(of.session, "", of.version, seen, of.limit - of.sampled)
