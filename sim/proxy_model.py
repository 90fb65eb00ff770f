"""The LLMProxy in virtual time: the live router picks the engine, and who finds no room waits in order."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from rubato.actors.proxy.placement import USUAL, Lane, Line
from rubato.planning.engine_info import EngineInfo, WeightsId, WeightsNeed
from rubato.planning.routing import Choice, EngineView, choose
from rubato.sim.affinity_model import ModelledAffinity
from rubato.sim.engine_model import ModelledEngine
from rubato.sim.manager_model import TurnRequest
from rubato.sim.moves_model import ModelledCarry
from rubato.sim.timeline import Cancelled, SimEvent, SimProcess, Timeline


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


class MoveOrder(NamedTuple):
    """A turn on its way from one engine to another, once it is out of the first."""

    taken_off: SimProcess
    """Ends with the tokens that are still to come."""
    ordered_s: float
    source: ModelledEngine
    target: ModelledEngine


@dataclass(eq=False, slots=True)
class WaitingTurn:
    """A turn that wants a seat: `context` tokens are known when it begins."""

    request: TurnRequest
    task: str
    context: int
    placed: SimEvent


class ModelledProxy:
    """Routes by `rubato.planning.routing.choose` on the views that actors/proxy/placement.py would have: a seat is taken when it is given."""

    def __init__(
        self,
        timeline: Timeline,
        engines: Sequence[RoutedEngine],
        affinity: ModelledAffinity | None = None,
        serving: Collection[str] | None = None,
    ) -> None:
        """`serving` names the engines that it may use at any moment; None means all."""
        self._serving = serving
        self._timeline = timeline
        self._affinity = affinity
        self.engines: dict[str, RoutedEngine] = {engine.name: engine for engine in engines}
        self._seated: dict[str, dict[str, None]] = {name: {} for name in self.engines}
        """Engine → sessions whose turn it has, the oldest first."""
        self._moving: dict[str, MoveOrder] = {}
        self._carry = ModelledCarry()
        self.moved = 0
        """Turns that changed their engine."""
        self._views: dict[str, EngineView] = {}
        self._sessions: dict[str, tuple[str, int]] = {}
        """Session → engine of its last turn, and the tokens that it had then."""
        self._line: Line[WaitingTurn] = Line()
        for engine in engines:
            engine.on_change = self._changed
            self._see(engine)

    async def generate(self, request: TurnRequest, context: int, new_tokens: int, task: str = "") -> int:
        """The version that began to sample `new_tokens` behind `context`, on an engine that may serve `task`."""
        affinity = self._affinity
        if affinity is None:
            return await self._generate(request, context, new_tokens, task)
        affinity.came()
        try:
            version = await self._generate(request, context, new_tokens, task)
        except Cancelled:
            affinity.left()
            raise
        affinity.ended(task, new_tokens)
        return version

    async def _generate(self, request: TurnRequest, context: int, new_tokens: int, task: str) -> int:
        engine = self.engines[await self._place(WaitingTurn(request, task, context, self._timeline.event()))]
        session, total = request.session, context + new_tokens
        self._sessions[session] = (engine.name, total)
        try:
            version = await engine.generate(session, context, new_tokens, request.min_version)
            while (order := self._moving.pop(session, None)) and (left := await order.taken_off.ended):
                have, source, engine = total - left, order.source, order.target
                carried = self._carry.is_carried(source, have, same_weights=engine.version == source.version)
                if carried:
                    await self._timeline.sleep(source.model.kv_move_s(have))
                    self._carry.travelled(source.name, engine.name, have, self._timeline.now - order.ordered_s)
                self._take_seat(session, engine)
                self._leave_seat(session, source)
                self._sessions[session] = (engine.name, total)
                if carried and engine.version == source.version:
                    order.target.adopt(session, have)
                await engine.generate(session, have, left, request.min_version)
                self.moved += 1
            return version
        finally:
            self._leave_seat(session, engine)

    def requests(self) -> Mapping[str, Sequence[str]]:
        """Sessions whose turn an engine has, by engine, the oldest first."""
        return {name: tuple(seated) for name, seated in self._seated.items()}

    def move(self, session: str, target: str) -> None:
        """Let the engine `target`, a modelled one as all are then, go on with the turn of `session`."""
        to = self.engines[target]
        source = self.engines[next(name for name, seated in self._seated.items() if session in seated)]
        if source is to:
            return
        assert isinstance(to, ModelledEngine)
        assert isinstance(source, ModelledEngine)
        self._moving[session] = MoveOrder(self._timeline.start(source.abort(session)), self._timeline.now, source, to)

    def forget(self, session: str) -> None:
        """The trajectory is over: its KV is free."""
        if found := self._sessions.pop(session, None):
            self.engines[found[0]].forget(session)

    async def _place(self, turn: WaitingTurn) -> str:
        lane = Lane(USUAL, turn.task if self._affinity is not None else "")
        name = None if lane in self._line else self._seat(turn)
        if name is not None:
            return name
        self._line.add(lane, turn)
        try:
            return await turn.placed
        except Cancelled:
            if not self._line.remove(turn):
                self._leave_seat(turn.request.session, self.engines[turn.placed.value])
            raise

    def _seat(self, turn: WaitingTurn) -> str | None:
        request, affinity = turn.request, self._affinity
        sticky, held = self._sessions.get(request.session, (None, 0))
        if affinity is None:
            views = self._views.values() if self._serving is None else [self._views[each] for each in self._serving]
            found = choose(views, request.session, WeightsNeed(request.min_version), sticky)
        else:
            found = affinity.route(request, turn.task, self._views, sticky)
        name = found.engine if isinstance(found, Choice) else None
        if name is not None:
            self._take_seat(request.session, self.engines[name])
            if affinity is not None:
                new = turn.context - (held if sticky == name else 0)
                affinity.began(turn.task, name, sticky, turn.context, max(1, new))
        return name

    def _take_seat(self, session: str, engine: RoutedEngine) -> None:
        self._seated[engine.name][session] = None
        self._see(engine)

    def _leave_seat(self, session: str, engine: RoutedEngine) -> None:
        del self._seated[engine.name][session]
        self._changed(engine)

    def _see(self, engine: RoutedEngine) -> None:
        name = engine.name
        info = EngineInfo(name, engine.num_slots, (WeightsId(engine.version),), engine.suspended)
        self._views[name] = EngineView(info, len(self._seated[name]))

    def _changed(self, engine: RoutedEngine) -> None:
        """Seat those who wait, in order, until no engine has room for the first of any lane."""
        self._see(engine)
        stuck: set[Lane] = set()
        while (lane := next((lane for lane in self._line.lanes() if lane not in stuck), None)) is not None:
            turn = self._line.first(lane)
            name = self._seat(turn)
            if name is None:
                stuck.add(lane)
            else:
                self._line.take(lane).placed.set(name)
