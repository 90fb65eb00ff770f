"""The engines as the proxy knows them: which are there, which request sits on which, and the bounded queues of those that wait for room."""

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

import msgspec

from rubato.actors.messages.generation import Aborted, Completion, Generate, Route
from rubato.actors.requests import SharedRequest
from rubato.planning.routing import EngineView, Wait
from rubato.runtime.observe.figures import Wait as ShownWait

if TYPE_CHECKING:
    from rubato.actors.proxy.picker import EnginePicker
    from rubato.runtime.courier import Ref


@dataclass(eq=False)
class EngineAsk:
    """A request's ask of one engine, for its answer or what failed."""

    seat: "EngineSeat"
    future: "asyncio.Future[Any]"
    wait: ShownWait
    taken_away: bool = False

    def take_away(self) -> None:
        """End it: the request goes on elsewhere, or ends with its `abort_reason`."""
        self.taken_away = True
        self.future.cancel()


class ProxyRequest(SharedRequest):
    """One request that is not answered yet. Its `tokens` are what another engine goes on with."""

    def __init__(self, request: Generate) -> None:
        super().__init__(request)
        self.seat: EngineSeat | None = None
        """The one engine it lives on, or lived on last; None until it got one."""
        self.asked: EngineAsk | None = None
        """While that engine is asked."""
        self.second: EngineAsk | None = None
        """Another ask that stands for it just as well, for as long as a mechanism has two engines asked for it."""
        self.settles: Callable[[EngineAsk], bool] | None = None
        """Set by that mechanism: whether what an ask came to is the request's."""
        self.wait: ShownWait
        """In line for a seat."""
        self.began = asyncio.get_running_loop().time()
        self.deaths = 0
        """Engines that died while they ran it."""

    @property
    def engine(self) -> str:
        """Name of its engine; empty until it got a seat."""
        return "" if self.seat is None else self.seat.name

    @property
    def num_tokens(self) -> int:
        return len(self.tokens.ids) // 4

    def to_send(self, route: Route) -> Generate:
        """The request as the next engine gets it, with the tokens sampled so far."""
        request = self.request
        if self.tokens is request.resumed and route is request.route:
            return request
        return msgspec.structs.replace(request, resumed=self.tokens, route=route)

    def outcome(self) -> Completion | Aborted | None:
        """The answer that follows from what is known without an engine, if one does."""
        request = self.request
        if self.abort_reason:
            return Aborted(request.request_id, self.tokens, self.abort_reason)
        if self.tokens.ids:
            if int.from_bytes(self.tokens.ids[-4:], "little", signed=True) in request.sampling.stop_token_ids:
                return Completion(request.request_id, self.tokens, "stop", self.engine)
            if self.num_tokens >= request.sampling.max_new_tokens:
                return Completion(request.request_id, self.tokens, "length", self.engine)
        return None

    @property
    def asks(self) -> list[EngineAsk]:
        """Asks that run now: usually one, none while it stands in line."""
        return [ask for ask in (self.second, self.asked) if ask is not None]

    def take_away(self, seat: "EngineSeat | None" = None) -> None:
        """End the asks that run now, or that of one engine."""
        for ask in self.asks:
            if seat is None or ask.seat is seat:
                ask.take_away()


@dataclass(eq=False, slots=True)
class EngineSeat(EngineView):
    """One incarnation of an engine, from its first status until it leaves; the picker looks at what it has of an EngineView."""

    ref: "Ref" = field(kw_only=True)
    requests: dict[str, ProxyRequest] = field(default_factory=dict)
    lost: int = 0
    lost_tokens: int = 0
    """Requests taken away from it, with their tokens: for the sentence when it is gone."""
    handed_back: bool = False
    gone: bool = False


EXACT, PASSED, USUAL = 0, 1, 2
"""Priorities of lanes, highest first: evaluations; requests passed over, since only engines pinned to an older version had room; others."""


T = TypeVar("T")


class Lane(NamedTuple):
    """Its members are served in order."""

    rank: int
    name: str
    """Name of the set of engines that its members may use."""


class Line(Generic[T]):
    """The lanes that have members."""

    def __init__(self) -> None:
        self._lanes: dict[Lane, deque[tuple[int, T]]] = {}
        self._numbers = count(1)

    def __len__(self) -> int:
        return sum(map(len, self._lanes.values()))

    def __contains__(self, lane: Lane) -> bool:
        return lane in self._lanes

    def add(self, lane: Lane, one: T, *, first: bool = False) -> None:
        """Stand at the lane's end, or, `first`, before all of its rank."""
        members, number = self._lanes.setdefault(lane, deque()), next(self._numbers)
        if first:
            members.appendleft((-number, one))
        else:
            members.append((number, one))

    def lanes(self) -> list[Lane]:
        """By rank, and of equal rank those whose first came earliest: where none is held up, that is the order of a single line."""
        if len(self._lanes) <= 1:
            return list(self._lanes)
        return sorted(self._lanes, key=lambda lane: (lane.rank, self._lanes[lane][0][0]))

    def first(self, lane: Lane) -> T:
        return self._lanes[lane][0][1]

    def take(self, lane: Lane) -> T:
        """The first of the lane, which leaves."""
        members = self._lanes[lane]
        _, one = members.popleft()
        if not members:
            del self._lanes[lane]
        return one

    def remove(self, one: T) -> bool:
        """False where it stands in no lane."""
        for lane, members in self._lanes.items():
            entry = next((entry for entry in members if entry[1] is one), None)
            if entry is not None:
                members.remove(entry)
                if not members:
                    del self._lanes[lane]
                return True
        return False


class Placement:
    """Gives each request one seat. A seat is taken before the engine is asked, so that a burst never overshoots."""

    picker: "EnginePicker"
    """Set by the proxy, whose engines it picks from."""

    def __init__(self, max_waiting: int, on_turn: Callable[[ProxyRequest, EngineSeat | None], None]) -> None:
        """`on_turn` ends the wait of a request in line: with its seat, or with None where `abort_reason` says why there is none."""
        self._on_turn = on_turn
        self.seats: dict[str, EngineSeat] = {}
        """The engines that may be given requests."""
        self.located: dict[str, str] = {}
        """Request id → the engine that has it already: found there as this proxy started, or named by a HandedOver. Its next ask goes there."""
        self._line: Line[ProxyRequest] = Line()
        self._max_waiting = max_waiting

    @property
    def num_waiting(self) -> int:
        return len(self._line)

    @property
    def full(self) -> bool:
        return self.num_waiting >= self._max_waiting

    def join(self, seat: EngineSeat) -> None:
        """The engine may be given requests from now on."""
        self.seats[seat.name] = seat
        self.picker = self.picker.joined(seat)
        self.look()

    def remove(self, name: str) -> EngineSeat | None:
        """The engine gets no more requests; those it has keep their seat until they are taken away."""
        seat = self.seats.pop(name, None)
        if seat is not None:
            self.picker.left(seat)
        for request_id in [r for r, engine in self.located.items() if engine == name]:
            del self.located[request_id]
        self.look()  # an exact request may wait for it in vain
        return seat

    def changed(self, seat: EngineSeat, **told: Any) -> None:
        """Something the picker looks at changed, such as the fields `told` of its info: seat those who can be."""
        if told:
            seat.info = msgspec.structs.replace(seat.info, **told)
        if self.seats.get(seat.name) is seat:
            self.picker.changed(seat)
        self.look()

    def try_take(self, shared: ProxyRequest) -> EngineSeat | None:
        """A seat at once, unless others wait already or no engine has room."""
        if self.located:
            known = self.seats.get(self.located.pop(shared.request.request_id, ""))
            if known is not None:
                return self.take(shared, known)
        if self._lane(shared) in self._line:
            return None
        picked = self.picker.pick(shared)
        return None if isinstance(picked, Wait) else self.take(shared, self.seats[picked])

    def take(self, shared: ProxyRequest, seat: EngineSeat) -> EngineSeat:
        """This seat, whether the engine has room or not."""
        self.picker.seated(shared, seat)
        shared.seat = seat
        seat.requests[shared.request.request_id] = shared
        seat.in_flight = len(seat.requests)
        return seat

    def line_up(self, shared: ProxyRequest) -> None:
        """Stand in line until an engine has room; its turn may come at once."""
        self._line.add(self._lane(shared), shared, first=self.picker.goes_first(shared))
        self.picker.waits(shared)
        self.look()

    def leave(self, shared: ProxyRequest) -> bool:
        """Leave the line; False where it did not stand in it."""
        return self._line.remove(shared)

    def release(self, seat: EngineSeat, shared: ProxyRequest) -> None:
        """The request left the engine, answered or not."""
        seat.requests.pop(shared.request.request_id, None)
        seat.in_flight = len(seat.requests)
        self.picker.released(shared, seat)
        self.changed(seat)

    def look(self) -> None:
        """Seat those who wait, in order, until no engine has room for the first of any lane; evaluations go first."""
        stuck: set[Lane] = set()
        while (lane := next((lane for lane in self._line.lanes() if lane not in stuck), None)) is not None:
            if not self._next(lane):
                stuck.add(lane)

    def _lane(self, shared: ProxyRequest) -> Lane:
        return Lane(EXACT, "") if shared.request.weights.exact else Lane(USUAL, self.picker.queue(shared))

    def _next(self, lane: Lane) -> bool:
        """Seat the first of `lane`, or have it wait elsewhere; False while it has to wait there."""
        match self.picker.pick(self._line.first(lane)):
            case str(engine):
                shared = self._line.take(lane)
                self._on_turn(shared, self.take(shared, self.seats[engine]))
            case Wait.NEVER:
                shared = self._line.take(lane)
                shared.abort_reason = f"no engine holds version {shared.request.weights.version} any more"
                self._on_turn(shared, None)
            case Wait.PINNED if lane.rank == USUAL:
                self._line.add(Lane(PASSED, lane.name), self._line.take(lane))
            case _:
                return False
        return True
