"""Which engines are there: takes newcomers in, takes the requests of those that leave away, and carries commands to them."""

import asyncio
from collections.abc import Callable

from actors.messages.generation import Abort, EngineStatus, Inspect, Resume, Suspend
from actors.proxy.inflight import InFlight
from actors.proxy.placement import EngineSeat, Placement
from bus.errors import AskFailed, Failed
from runtime.actor import Actor

LEAVE_GRACE_S = 0.25
"""An engine that left is given this long to hand its requests back with all their tokens (it drains) before they move with
those it had streamed (it died)."""

REST_S = 0.2
"""An engine that refused or could not be reached gets no new request for this long: a failing ask is not repeated in a loop."""

COMMAND_S = 30.0
"""Limit of one command to one engine: longer than any decode step."""

INSPECT_S = 5.0
"""Limit of asking one engine for its status, and of waiting for all of them at the start."""


class Roster:
    """The engines of one proxy, from the moment they are ready until their last request was taken away."""

    def __init__(
        self, actor: Actor, placement: Placement, flights: InFlight, on_joined: Callable[[EngineSeat], None]
    ) -> None:
        self._actor, self._placement, self._flights, self._on_joined = actor, placement, flights, on_joined
        self._inspections: dict[str, asyncio.Task[None]] = {}
        self._suspended = False

    async def first_look(self) -> None:
        """Inspect every engine that is ready now."""
        for name in self._actor.peers("engine"):
            self._welcome(name)
        if self._inspections:
            await asyncio.wait(list(self._inspections.values()), timeout=INSPECT_S)

    def changed(self, joined: tuple[str, ...], left: tuple[str, ...]) -> None:
        """Membership changed; one that is in both restarted, so the old one can hand nothing back."""
        for name in left:
            if task := self._inspections.pop(name, None):
                task.cancel()
            seat = self._placement.remove(name)
            if seat is not None and name in joined:
                self._gone(seat)
            elif seat is not None:
                self._actor.spawn(self._farewell(seat), name=f"{self._actor.name}.farewell.{name}")
        for name in joined:
            if name.rpartition("-")[0] == "engine":
                self._welcome(name)

    def rest(self, seat: EngineSeat, why: str) -> None:
        """Give the engine no new request for a moment."""
        if not seat.resting:
            self._actor.log.info("engine_rests", engine=seat.name, for_s=REST_S, why=why)
            seat.resting = True
            self._placement.changed(seat)
            self._actor.spawn(self._wake(seat), name=f"{self._actor.name}.rest.{seat.name}")

    # -- commands ---------------------------------------------------------------------------------------------------

    async def command(self, seat: EngineSeat, command: Abort | Suspend | Resume) -> bool:
        """False when the engine did not carry it out; one that is leaving loses what it runs anyway."""
        try:
            await seat.ref.ask(command, timeout=COMMAND_S)
        except AskFailed as error:
            what = type(command).__name__
            self._actor.log.warning("engine_not_commanded", engine=seat.name, command=what, error=str(error))
            return False
        return True

    async def suspend_all(self, command: Suspend | Resume) -> None:
        """Suspend or resume every engine, and those that join later. Raises Failed naming those still here that did not obey."""
        self._suspended = isinstance(command, Suspend)
        seats = list(self._placement.seats.values())
        for seat in seats:
            seat.suspended = True
            self._placement.changed(seat)
        async with asyncio.TaskGroup() as tasks:
            done = [tasks.create_task(self.command(seat, command)) for seat in seats]
        stubborn: list[str] = []
        for seat, task in zip(seats, done, strict=True):
            if task.result():
                seat.suspended = isinstance(command, Suspend)
                self._placement.changed(seat)
            elif self._placement.seats.get(seat.name) is seat:
                stubborn.append(seat.name)
        if stubborn:
            raise Failed(f"{type(command).__name__} did not reach {', '.join(stubborn)}: ask again")

    def abort_at(self, seat: EngineSeat, request_id: str, reason: str) -> None:
        """Have the engine drop a request that nobody waits for there; not waited for."""
        self._actor.spawn(self.command(seat, Abort(request_id, reason)), name=f"{self._actor.name}.abort")

    # -- joining and leaving ----------------------------------------------------------------------------------------

    def _welcome(self, name: str) -> None:
        if name not in self._inspections and name not in self._placement.seats:
            task = self._actor.spawn(self._inspect(name), name=f"{self._actor.name}.inspect.{name}")
            self._inspections[name] = task

    async def _inspect(self, name: str) -> None:
        """Ask a new engine for its status until it answers or leaves; then it gets requests."""
        ref, pause_s = self._actor.ref(name), REST_S
        while True:
            try:
                if self._suspended:
                    await ref.ask(Suspend(), timeout=COMMAND_S)
                status = await ref.ask(Inspect(), timeout=INSPECT_S)
                if status.suspended == self._suspended:
                    break
                if status.suspended:
                    await ref.ask(Resume(), timeout=COMMAND_S)
            except AskFailed as error:
                self._actor.log.warning("engine_not_inspected", engine=name, error=str(error))
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, INSPECT_S)
        self._inspections.pop(name, None)
        self._take_in(status, EngineSeat(status, ref))

    def _take_in(self, status: EngineStatus, seat: EngineSeat) -> None:
        for request_id in (*status.running, *status.finished):
            if self._flights.find(request_id) is None:
                self._placement.located[request_id] = seat.name
            elif request_id in status.running:
                self.abort_at(seat, request_id, "it lives on another engine now")
        self._placement.join(seat)
        self._actor.log.info("engine_joined", engine=seat.name, version=seat.version, num_slots=seat.num_slots)
        self._on_joined(seat)

    async def _farewell(self, seat: EngineSeat) -> None:
        await asyncio.sleep(LEAVE_GRACE_S)
        self._gone(seat)

    def _gone(self, seat: EngineSeat) -> None:
        """Take every request away from an engine that left; they move with the tokens they have."""
        seat.gone = True
        flights = list(seat.flights.values())
        for flight in flights:
            flight.take_away()
        num = seat.lost + len(flights)
        tokens = seat.lost_tokens + sum(flight.num_tokens for flight in flights)
        if num:
            to = ", ".join(sorted(self._placement.seats)) or "the next engine that is ready"
            verb = "was drained" if seat.handed_back else "died"
            requests = "1 request moves" if num == 1 else f"{num} requests move"
            self._actor.notice(f"{seat.name} {verb}: {requests} to {to} with the {tokens} tokens sampled so far")
        self._actor.log.info("engine_left", engine=seat.name, moved=num, tokens=tokens)

    async def _wake(self, seat: EngineSeat) -> None:
        await asyncio.sleep(REST_S)
        seat.resting = False
        self._placement.changed(seat)
