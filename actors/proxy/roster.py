"""Which engines the proxy has: from the moment they are ready until their last request was taken away."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from actors.gateway.requests import SharedRequests
from actors.messages.engines import GENERATION
from actors.messages.generation import Abort, Inspect, Resume, Suspend
from actors.proxy.placement import EngineSeat, Placement, ProxyRequest
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


@dataclass(eq=False)
class Roster:
    """The engines of one proxy, from the moment they are ready until their last request was taken away."""

    actor: Actor
    placement: Placement
    requests: SharedRequests[ProxyRequest]
    on_joined: Callable[[EngineSeat], None]

    def __post_init__(self) -> None:
        self._inspections: dict[str, asyncio.Task[None]] = {}
        self._suspended = False

    async def first_look(self) -> None:
        """Inspect every engine that is ready now."""
        for name in self.actor.peers(GENERATION):
            self._welcome(name)
        if self._inspections:
            await asyncio.wait(list(self._inspections.values()), timeout=INSPECT_S)

    def changed(self, joined: tuple[str, ...], left: tuple[str, ...]) -> None:
        """Membership changed; one that is in both restarted, so the old one can hand nothing back."""
        for name in left:
            if task := self._inspections.pop(name, None):
                task.cancel()
            seat = self.placement.remove(name)
            if seat is not None and name in joined:
                self._gone(seat)
            elif seat is not None:
                self.actor.spawn(self._farewell(seat), name=f"{self.actor.name}.farewell.{name}")
        for name in joined:
            if name in self.actor.peers(GENERATION):
                self._welcome(name)

    def rest(self, seat: EngineSeat, why: str) -> None:
        """Give the engine no new request for a moment."""
        if not seat.resting:
            self.actor.log.info("engine_rests", engine=seat.name, for_s=REST_S, why=why)
            seat.resting = True
            self.placement.changed(seat)
            self.actor.spawn(self._wake(seat), name=f"{self.actor.name}.rest.{seat.name}")

    # -- commands ---------------------------------------------------------------------------------------------------

    async def command(self, seat: EngineSeat, command: Abort | Suspend | Resume) -> bool:
        """False when the engine did not carry it out; one that is leaving loses what it runs anyway."""
        try:
            await seat.ref.ask(command, timeout=COMMAND_S)
        except AskFailed as error:
            what = type(command).__name__
            self.actor.log.warning("engine_not_commanded", engine=seat.name, command=what, error=str(error))
            return False
        return True

    async def command_all(self, command: Suspend | Resume) -> None:
        """Suspend or resume every engine, and those that join later. Raises Failed naming those still here that did not obey."""
        self._suspended = isinstance(command, Suspend)
        seats = list(self.placement.seats.values())
        for seat in seats:
            self.placement.changed(seat, suspended=True)
        async with asyncio.TaskGroup() as tasks:
            done = [tasks.create_task(self.command(seat, command)) for seat in seats]
        stubborn: list[str] = []
        for seat, task in zip(seats, done, strict=True):
            if task.result():
                self.placement.changed(seat, suspended=isinstance(command, Suspend))
            elif self.placement.seats.get(seat.name) is seat:
                stubborn.append(seat.name)
        if stubborn:
            raise Failed(f"{type(command).__name__} did not reach {', '.join(stubborn)}: ask again")

    # -- joining and leaving ----------------------------------------------------------------------------------------

    def _welcome(self, name: str) -> None:
        if name not in self._inspections and name not in self.placement.seats:
            task = self.actor.spawn(self._inspect(name), name=f"{self.actor.name}.inspect.{name}")
            self._inspections[name] = task

    async def _inspect(self, name: str) -> None:
        """Ask a new engine for its status until it answers or leaves; then it gets requests."""
        ref, pause_s = self.actor.ref(name), REST_S
        dropped: set[str] = set()
        while True:
            try:
                if self._suspended:
                    await ref.ask(Suspend(), timeout=COMMAND_S)
                status = await ref.ask(Inspect(), timeout=INSPECT_S)
                # What lives elsewhere now is dropped before it can come back: the engine would take it for what it runs.
                strays = [i for i in status.running if i in self.requests.running and i not in dropped]
                for request_id in strays:
                    await ref.ask(Abort(request_id, "it lives on another engine now"), timeout=COMMAND_S)
                    dropped.add(request_id)
                if status.info.suspended == self._suspended and not strays:
                    break
                if status.info.suspended and not self._suspended:
                    await ref.ask(Resume(), timeout=COMMAND_S)
            except AskFailed as error:
                self.actor.log.warning("engine_not_inspected", engine=name, error=str(error))
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, INSPECT_S)
        self._inspections.pop(name, None)
        seat = EngineSeat(status.info, ref=ref)
        for request_id in (*status.running, *status.finished):
            if request_id not in self.requests.running:
                self.placement.located[request_id] = name
        self.placement.join(seat)
        self.actor.log.info("engine_joined", engine=name, version=seat.info.version, num_slots=seat.info.num_slots)
        self.on_joined(seat)

    async def _farewell(self, seat: EngineSeat) -> None:
        await asyncio.sleep(LEAVE_GRACE_S)
        self._gone(seat)

    def _gone(self, seat: EngineSeat) -> None:
        """Take every request away from an engine that left; they move with the tokens they have."""
        seat.gone = True
        requests = list(seat.requests.values())
        for shared in requests:
            shared.take_away(seat)
        num = seat.lost + len(requests)
        tokens = seat.lost_tokens + sum(shared.num_tokens for shared in requests)
        if num:
            to = ", ".join(sorted(self.placement.seats)) or "the next engine that is ready"
            verb = "was drained" if seat.handed_back else "is gone"
            what = "1 request moves" if num == 1 else f"{num} requests move"
            self.actor.notice(f"{seat.name} {verb}: {what} to {to} with the {tokens} tokens sampled so far")
        self.actor.log.info("engine_left", engine=seat.name, moved=num, tokens=tokens)

    async def _wake(self, seat: EngineSeat) -> None:
        await asyncio.sleep(REST_S)
        seat.resting = False
        self.placement.changed(seat)
