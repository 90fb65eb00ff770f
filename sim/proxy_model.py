"""The LLMProxy in virtual time: the live router picks the engine, and who finds no room waits in order."""

from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol

from planning.routing import EngineView, RequestView, choose, goes_first
from sim.timeline import SimEvent, Timeline


class RoutedEngine(Protocol):
    """What the proxy knows of an engine. It sets `on_change`, which the engine calls when its version or suspension changes."""

    name: str
    on_change: Callable[[Any], None]

    @property
    def version(self) -> int: ...
    @property
    def suspended(self) -> bool: ...
    @property
    def num_slots(self) -> int: ...
    async def generate(self, session: str, context: int, new_tokens: int, min_version: int = 0) -> int: ...
    def forget(self, session: str) -> None: ...


class ModelledProxy:
    """Routes by `planning.routing.choose` on the views that actors/proxy/placement.py would have: a seat is taken when it is given."""

    def __init__(self, timeline: Timeline, engines: Sequence[RoutedEngine]) -> None:
        self._timeline = timeline
        self.engines: dict[str, RoutedEngine] = {engine.name: engine for engine in engines}
        self._in_flight = dict.fromkeys(self.engines, 0)
        self._views: dict[str, EngineView] = {}
        self._sessions: dict[str, str] = {}
        self._waiting: deque[tuple[RequestView, Collection[str], SimEvent]] = deque()
        for engine in engines:
            engine.on_change = self._changed
            self._see(engine)

    async def generate(self, request: RequestView, context: int, new_tokens: int, allowed: Collection[str] = ()) -> int:
        """The version that began to sample `new_tokens` behind `context`; `allowed` names the engines that may, none means all."""
        engine = self.engines[await self._place(request, allowed)]
        try:
            return await engine.generate(request.session, context, new_tokens, request.min_version)
        finally:
            self._in_flight[engine.name] -= 1
            self._changed(engine)

    def forget(self, session: str) -> None:
        """The trajectory is over: its KV is free."""
        if name := self._sessions.pop(session, None):
            self.engines[name].forget(session)

    async def _place(self, request: RequestView, allowed: Collection[str]) -> str:
        name = None if self._waiting else self._seat(request, allowed)
        if name is not None:
            return name
        entry = (request, allowed, self._timeline.event())
        if goes_first(request):
            self._waiting.appendleft(entry)
        else:
            self._waiting.append(entry)
        return await entry[2]

    def _seat(self, request: RequestView, allowed: Collection[str]) -> str | None:
        views = [self._views[name] for name in allowed] if allowed else self._views.values()
        name = choose(request, views, self._sessions.get(request.session)).engine
        if name is not None:
            self._sessions[request.session] = name
            self._in_flight[name] += 1
            self._see(self.engines[name])
        return name

    def _see(self, engine: RoutedEngine) -> None:
        name = engine.name
        self._views[name] = EngineView(name, engine.version, engine.num_slots, self._in_flight[name], engine.suspended)

    def _changed(self, engine: RoutedEngine) -> None:
        """Seat those who wait, in order, until no engine has room."""
        self._see(engine)
        while self._waiting:
            request, allowed, placed = self._waiting[0]
            name = self._seat(request, allowed)
            if name is None:
                return
            self._waiting.popleft()
            placed.set(name)
