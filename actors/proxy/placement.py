"""The engines as the proxy knows them: which are there, which request sits on which, and the bounded queue of those that wait for room."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from actors.messages.engines import GENERATION
from actors.messages.generation import (
    Abort,
    Aborted,
    Completion,
    Generate,
    Inspect,
    Modelled,
    MovedFrom,
    Resume,
    Suspend,
)
from actors.proxy.affinity import HardwareAffinity
from actors.proxy.line import EXACT, PASSED, USUAL, Lane, Line
from actors.proxy.stages import BOTH, DECODE, PREFILL, Stages
from actors.requests import SharedRequest, SharedRequests
from bus.errors import AskFailed, Failed
from planning.routing import EngineView, RequestView, Route, choose, goes_first
from runtime.actor import Actor
from runtime.observe.figures import Wait

if TYPE_CHECKING:
    from runtime.courier import Ref

LEAVE_GRACE_S = 0.25
"""An engine that left is given this long to hand its requests back with all their tokens (it drains) before they move with
those it had streamed (it died)."""

REST_S = 0.2
"""An engine that refused or could not be reached gets no new request for this long: a failing ask is not repeated in a loop."""

COMMAND_S = 30.0
"""Limit of one command to one engine: longer than any decode step."""

INSPECT_S = 5.0
"""Limit of asking one engine for its status, and of waiting for all of them at the start."""


class ProxyRequest(SharedRequest):
    """One request that is not answered yet. Its `tokens` are what a move to another engine carries."""

    def __init__(self, request: Generate) -> None:
        super().__init__(request)
        self.engine = ""
        """The one engine it lives on; empty until it got a seat."""
        self.seat: EngineSeat | None = None
        """The same, of the engine's incarnation."""
        self.asking: asyncio.Future[Any] | None = None
        """While an engine is asked, for its answer or what failed; cancelled to take the request away from it."""
        self.taken_away = False
        self.wait: Wait
        """For a seat, or for the engine's answer."""
        self.began = asyncio.get_running_loop().time()
        self.deaths = 0
        """Engines that died while they ran it."""
        self.stage = PREFILL
        """What the next engine does first; DECODE once another one has prefilled it."""
        self.cache_at = ""
        """The engine that prefilled it."""
        self.asked = self.seated = self.began
        """When it asked for an engine of its stage, and when it got one."""
        self.seated_for = PREFILL
        self.behind: Behind | None = None
        """The engine that it leaves, while it moves."""

    @property
    def num_tokens(self) -> int:
        return len(self.tokens.ids) // 4

    def view(self) -> RequestView:
        return RequestView(self.request.session, self.request.min_version, self.num_tokens, self.request.exact)

    def to_send(self, moved: MovedFrom | None = None, *, hand_over: bool = False) -> Generate:
        """The request as the next engine gets it: with the tokens sampled so far, and where it is parked or has its cache."""
        if self.tokens is self.request.resumed and moved is None and not hand_over:
            return self.request
        cache_at = "" if moved else self.cache_at
        return msgspec.structs.replace(
            self.request, resumed=self.tokens, moved=moved, hand_over=hand_over, cache_at=cache_at
        )

    def enter(self, stage: str, cache_at: str = "") -> None:
        """It goes on at another engine, from this stage on."""
        self.stage, self.cache_at = stage, cache_at
        self.asked = asyncio.get_running_loop().time()

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

    def take_away(self, seat: "EngineSeat | None" = None) -> None:
        """End the asks that run now, or that of one engine: the request goes on elsewhere, or ends with `abort_reason`."""
        if self.behind is not None and seat in (None, self.behind.seat):
            self.behind.taken_away = True
            self.behind.asking.cancel()
        if self.asking is not None and seat in (None, self.seat):
            self.taken_away = True
            self.asking.cancel()


@dataclass(eq=False)
class Behind:
    """A request's ask of the engine that parked it, while another one is asked to take it from there."""

    seat: "EngineSeat"
    asking: "asyncio.Future[Any]"
    wait: Wait
    epoch: int
    over: "asyncio.Future[bool]"
    """Whether it moved."""
    taken_away: bool = False


@dataclass(eq=False, slots=True)
class EngineSeat:
    """One incarnation of an engine, from its first status until it leaves."""

    name: str
    ref: "Ref"
    num_slots: int
    version: int
    suspended: bool
    held: bool = False
    """It stays on `version` for an evaluation."""
    serves: str = BOTH
    asleep: bool = False
    degree: int = 1
    """GPUs that share each of its layers."""
    modelled: Modelled | None = None
    restart_s: float = 0.0
    """What a change of degree takes it where it is started anew for that."""
    resting: bool = False
    """It refused or could not be reached a moment ago."""
    requests: dict[str, ProxyRequest] = field(default_factory=dict)
    lost: int = 0
    lost_tokens: int = 0
    """Requests taken away from it, with their tokens: for the sentence when it is gone."""
    handed_back: bool = False
    gone: bool = False
    bytes_in: int = 0
    bytes_out: int = 0
    """Prompts and tokens since the last rollout phase began."""

    def view(self) -> EngineView:
        stopped = self.suspended or self.resting
        num = len(self.requests)
        return EngineView(self.name, self.version, self.num_slots, num, stopped, self.held, self.asleep)


class Placement:
    """Gives each request one seat. A seat is taken before the engine is asked, so that a burst never overshoots."""

    def __init__(
        self,
        max_waiting: int,
        sessions_kept: int,
        on_turn: Callable[[ProxyRequest, EngineSeat | None], None],
        stages: Stages,
        affinity: HardwareAffinity | None = None,
    ) -> None:
        """`on_turn` ends the wait of a request in line: with its seat, or with None where `abort_reason` says why there is none."""
        self._affinity = affinity
        self.stages = stages
        stages.on_change = self.changed
        self._on_turn = on_turn
        self.seats: dict[str, EngineSeat] = {}
        self.located: dict[str, str] = {}
        """Request id → engine, for requests that engines ran or kept when this proxy started."""
        self._views: dict[str, EngineView] = {}
        self._line: Line[ProxyRequest] = Line()
        self._max_waiting = max_waiting
        self._sessions: dict[str, str] = {}
        """Session → engine of its last turn, the newest last. Forgetting one costs a recomputed cache, nothing else."""
        self._sessions_kept = sessions_kept

    @property
    def num_waiting(self) -> int:
        return len(self._line)

    @property
    def full(self) -> bool:
        return self.num_waiting >= self._max_waiting

    def join(self, seat: EngineSeat) -> None:
        """The engine may be given requests from now on."""
        self.seats[seat.name] = seat
        self.stages.join(seat)
        self.changed(seat)

    def remove(self, name: str) -> EngineSeat | None:
        """The engine gets no more requests; those it has keep their seat until they are taken away."""
        self._views.pop(name, None)
        self.stages.forget(name)
        if self._affinity is not None:
            self._affinity.forget(name)
        self._advance()  # an exact request may wait for it in vain
        for request_id in [r for r, engine in self.located.items() if engine == name]:
            del self.located[request_id]
        return self.seats.pop(name, None)

    def changed(self, seat: EngineSeat) -> None:
        """Something the router looks at changed: refresh its view, and let the queue move."""
        self._see(seat)
        self._advance()

    def try_take(self, shared: ProxyRequest) -> EngineSeat | None:
        """A seat at once, unless others wait already or no engine has room."""
        if self.located:
            known = self.seats.get(self.located.pop(shared.request.request_id, ""))
            if known is not None:
                return self._seat(shared, known)
        route = None if self._lane(shared) in self._line else self._route(shared)
        return self._seat(shared, self.seats[route.engine]) if route and route.engine else None

    def take(self, shared: ProxyRequest, seat: EngineSeat) -> EngineSeat:
        """This seat, whether the engine has room or not."""
        return self._seat(shared, seat)

    def line_up(self, shared: ProxyRequest) -> None:
        """Stand in line until an engine has room; its turn may come at once."""
        in_turn = self.stages.apart and shared.stage == DECODE  # all of these have tokens
        self._line.add(self._lane(shared), shared, first=goes_first(shared.view()) and not in_turn)
        if self._affinity is not None:
            self._affinity.look_later(self._advance, lambda: self.num_waiting > 0)
        self._advance()

    def leave(self, shared: ProxyRequest) -> bool:
        """Leave the line; False where it did not stand in it."""
        return self._line.remove(shared)

    def release(self, seat: EngineSeat, shared: ProxyRequest) -> None:
        """The request left the engine, answered or not."""
        seat.requests.pop(shared.request.request_id, None)
        if self.stages.apart:
            self.stages.left(shared, seat.name)
        self.changed(seat)

    def _lane(self, shared: ProxyRequest) -> Lane:
        """With affinity, each task waits by itself."""
        if shared.request.exact:
            return Lane(EXACT, "")
        if self.stages.apart:
            return Lane(USUAL, shared.stage)
        return Lane(USUAL, shared.request.task if self._affinity is not None else "")

    def _see(self, seat: EngineSeat) -> None:
        if self.seats.get(seat.name) is seat:
            view = self._views[seat.name] = seat.view()
            self.stages.see(view)
            if self._affinity is not None:
                self._affinity.see(view)

    def _route(self, shared: ProxyRequest) -> Route:
        request, views = shared.request, self._views.values()
        sticky = self._sessions.get(self._session(shared))
        if self.stages.apart and not request.exact:
            return choose(shared.view(), self.stages.usable(shared, self._views), sticky)
        if self._affinity is None or request.exact:
            return choose(shared.view(), views, sticky)
        return self._affinity.route(shared.view(), request.task, shared.began, sticky, views)

    def _seat(self, shared: ProxyRequest, seat: EngineSeat) -> EngineSeat:
        if self._affinity is not None and not shared.engine:
            self._affinity.began(shared.request, seat.name, self._sessions.get(shared.request.session))
        shared.engine, shared.seat = seat.name, seat
        seat.requests[shared.request.request_id] = shared
        session = self._session(shared)
        self._sessions.pop(session, None)
        self._sessions[session] = seat.name
        if self.stages.apart:
            self.stages.seated(shared, seat.name)
        if len(self._sessions) > self._sessions_kept:
            del self._sessions[next(iter(self._sessions))]
        self._see(seat)
        return seat

    def _session(self, shared: ProxyRequest) -> str:
        """A session may have a cache at an engine of each stage."""
        session = shared.request.session
        return f"{session} {shared.stage}" if self.stages.apart else session

    def _advance(self) -> None:
        """Seat those who wait, in order, until no engine has room for the first of any lane; evaluations go first."""
        stuck: set[Lane] = set()
        while (lane := next((lane for lane in self._line.lanes() if lane not in stuck), None)) is not None:
            if not self._next(lane):
                stuck.add(lane)

    def _next(self, lane: Lane) -> bool:
        """Seat the first of `lane`, or have it wait elsewhere; False while it has to wait there."""
        engine, why = self._route(self._line.first(lane))
        if engine is not None:
            shared = self._line.take(lane)
            self._on_turn(shared, self._seat(shared, self.seats[engine]))
        elif why == "no engine holds its version":
            shared = self._line.take(lane)
            shared.abort_reason = f"no engine holds version {shared.request.min_version} any more"
            self._on_turn(shared, None)
        elif why == "engines with room are held" and lane.rank == USUAL:
            self._line.add(Lane(PASSED, lane.name), self._line.take(lane))
        else:
            return False
        return True


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
            seat.suspended = True
            self.placement.changed(seat)
        async with asyncio.TaskGroup() as tasks:
            done = [tasks.create_task(self.command(seat, command)) for seat in seats]
        stubborn: list[str] = []
        for seat, task in zip(seats, done, strict=True):
            if task.result():
                seat.suspended = isinstance(command, Suspend)
                self.placement.changed(seat)
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
                if status.suspended == self._suspended and not strays:
                    break
                if status.suspended and not self._suspended:
                    await ref.ask(Resume(), timeout=COMMAND_S)
            except AskFailed as error:
                self.actor.log.warning("engine_not_inspected", engine=name, error=str(error))
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, INSPECT_S)
        self._inspections.pop(name, None)
        num_slots = max(1, status.num_slots)
        seat = EngineSeat(
            name,
            ref,
            num_slots,
            status.version,
            status.suspended,
            status.held,
            status.serves,
            status.asleep,
            status.degree,
            status.modelled,
            status.restart_s,
        )
        for request_id in (*status.running, *status.finished):
            if request_id not in self.requests.running:
                self.placement.located[request_id] = name
        self.placement.join(seat)
        self.actor.log.info("engine_joined", engine=name, version=seat.version, num_slots=seat.num_slots)
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
