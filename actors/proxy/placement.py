"""The engines as the proxy knows them, and the bounded first-in-first-out queue of requests that wait for room on one."""

import asyncio
from collections import deque
from typing import TYPE_CHECKING

from actors.messages.generation import EngineStatus
from actors.proxy.inflight import ProxyRequest
from actors.proxy.sessions import Sessions
from bus.errors import NotSent
from planning.routing import choose
from planning.snapshot import EngineView, RequestView

if TYPE_CHECKING:
    from runtime.ref import Ref


class EngineSeat:
    """One incarnation of an engine, from its first status until it leaves."""

    __slots__ = (
        "bytes_in",
        "bytes_out",
        "flights",
        "gone",
        "handed_back",
        "lost",
        "lost_tokens",
        "name",
        "num_slots",
        "ref",
        "resting",
        "suspended",
        "version",
    )

    def __init__(self, status: EngineStatus, ref: "Ref") -> None:
        self.name, self.ref = status.engine, ref
        self.num_slots = max(1, status.num_slots)
        self.version = status.version
        self.suspended = status.suspended
        self.resting = False
        """It refused or could not be reached a moment ago."""
        self.flights: dict[str, ProxyRequest] = {}
        self.lost = self.lost_tokens = 0
        """Requests taken away from it, with their tokens: for the sentence when it is gone."""
        self.handed_back = self.gone = False
        self.bytes_in = self.bytes_out = 0
        """Prompts and tokens since the last phase intent."""

    def view(self) -> EngineView:
        return EngineView(self.name, self.version, self.num_slots, len(self.flights), self.suspended or self.resting)


class Placement:
    """Gives each flight one seat. A seat is taken before the engine is asked, so that a burst never overshoots."""

    def __init__(self, sessions: Sessions, max_waiting: int) -> None:
        self.seats: dict[str, EngineSeat] = {}
        self.located: dict[str, str] = {}
        """Request id → engine, for requests that engines ran or kept when this proxy started."""
        self._views: dict[str, EngineView] = {}
        self._waiting: deque[tuple[ProxyRequest, asyncio.Future[EngineSeat | None]]] = deque()
        self._sessions = sessions
        self._max_waiting = max_waiting

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def full(self) -> bool:
        return len(self._waiting) >= self._max_waiting

    def join(self, seat: EngineSeat) -> None:
        """The engine may be given requests from now on."""
        self.seats[seat.name] = seat
        self.changed(seat)

    def remove(self, name: str) -> EngineSeat | None:
        """The engine gets no more requests; those it has keep their seat until they are taken away."""
        self._views.pop(name, None)
        for request_id in [r for r, engine in self.located.items() if engine == name]:
            del self.located[request_id]
        return self.seats.pop(name, None)

    def changed(self, seat: EngineSeat) -> None:
        """Something the router looks at changed: refresh its view, and let the queue move."""
        self._see(seat)
        self._advance()

    def try_take(self, flight: ProxyRequest) -> EngineSeat | None:
        """A seat at once, unless others wait already or no engine has room."""
        if self.located:
            known = self.seats.get(self.located.pop(flight.request.request_id, ""))
            if known is not None:
                return self._seat(flight, known)
        return None if self._waiting else self._route(flight)

    async def take(self, flight: ProxyRequest, deadline: float) -> EngineSeat | None:
        """A seat once the flight is first in the queue and an engine has room; None when it was aborted meanwhile.

        A flight that has tokens already goes to the head: others of its group are further than those who have none. Raises NotSent at `deadline` (loop time).
        """
        future: asyncio.Future[EngineSeat | None] = asyncio.get_running_loop().create_future()
        entry = (flight, future)
        if flight.tokens.ids:
            self._waiting.appendleft(entry)
        else:
            self._waiting.append(entry)
        try:
            async with asyncio.timeout_at(deadline):
                return await future
        except TimeoutError:
            self._withdraw(entry)
            raise NotSent(f"{flight.request.request_id}: no engine had room before the deadline") from None
        except asyncio.CancelledError:
            self._withdraw(entry)
            raise

    def release(self, seat: EngineSeat, flight: ProxyRequest) -> None:
        """The flight left the engine, answered or not."""
        seat.flights.pop(flight.request.request_id, None)
        self.changed(seat)

    def abort(self, flight: ProxyRequest) -> None:
        """Wake the flight if it waits; its `abort_reason` is set."""
        for entry in self._waiting:
            if entry[0] is flight:
                self._waiting.remove(entry)
                if not entry[1].done():
                    entry[1].set_result(None)
                return

    def _see(self, seat: EngineSeat) -> None:
        if self.seats.get(seat.name) is seat:
            self._views[seat.name] = seat.view()

    def _route(self, flight: ProxyRequest) -> EngineSeat | None:
        request = flight.request
        view = RequestView(request.session, request.min_version)
        route = choose(view, self._views.values(), self._sessions.engine_of(request.session))
        return None if route.engine is None else self._seat(flight, self.seats[route.engine])

    def _seat(self, flight: ProxyRequest, seat: EngineSeat) -> EngineSeat:
        flight.engine = seat.name
        seat.flights[flight.request.request_id] = flight
        self._sessions.served(flight.request.session, seat.name)
        self._see(seat)
        return seat

    def _advance(self) -> None:
        """Seat those who wait, in order, until no engine has room."""
        while self._waiting:
            flight, future = self._waiting[0]
            if not future.done():
                seat = self._route(flight)
                if seat is None:
                    return
                future.set_result(seat)
            self._waiting.popleft()

    def _withdraw(self, entry: "tuple[ProxyRequest, asyncio.Future[EngineSeat | None]]") -> None:
        flight, future = entry
        if entry in self._waiting:
            self._waiting.remove(entry)
        if future.done() and not future.cancelled():
            seat = future.result()
            if seat is not None:
                self.release(seat, flight)
