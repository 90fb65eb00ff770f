"""LLMProxy: routes requests to engines; every request lives on exactly one engine and outlives it."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec

from rubato.actors import plugins
from rubato.actors.messages.generation import (
    GENERATION,
    Abort,
    Aborted,
    Completion,
    Generate,
    GenerateReply,
    HandedBack,
    HandedOver,
    InfoChanged,
    Inspect,
    NotItsTurn,
    Resume,
    Route,
    Suspend,
    TokensSampled,
)
from rubato.actors.proxy.picker import PickerHost, ProxyHook, picker_of
from rubato.actors.proxy.placement import EngineAsk, EngineSeat, Placement, ProxyRequest
from rubato.actors.proxy.section import ProxyConfig
from rubato.actors.requests import Run, SharedRequests
from rubato.bus.errors import AskFailed, Failed, NotSent, Refused, Unknown
from rubato.bus.message import Ack
from rubato.planning.engine_info import WeightsId
from rubato.runtime.actor import Actor, Handles, handler
from rubato.runtime.config import Config as Job
from rubato.runtime.courier import budget, current_trace
from rubato.runtime.errors import NotRunning
from rubato.runtime.importer import check_module
from rubato.runtime.kernel import Kernel
from rubato.runtime.observe.figures import Wait

LEAVE_GRACE_S = 0.25
"""An engine that left is given this long to hand its requests back with all their tokens (it drains) before they go to others with
those it had streamed (it died)."""

REST_S = 0.2
"""An engine that refused or could not be reached gets no new request for this long: a failing ask is not repeated in a loop."""

COMMAND_S = 30.0
"""Limit of one command to one engine: longer than any decode step."""

INSPECT_S = 5.0
"""Limit of asking one engine for its status, and of waiting for all of them at the start."""

DRAIN_S = 1.0
"""Longest wait of a drain for requests that run here: none begins meanwhile, and these may take minutes."""


class LLMProxy(plugins.Hooked[ProxyHook], Actor):
    """Routes Generate to engines. A second ask with the same request id joins the first, or gets its result."""

    role = "llm_proxy"
    least = 1
    needs = ("engine",)
    drain_order = 60
    hook_messages = plugins.PROXY_MESSAGES

    class Config(ProxyConfig):
        pass

    config: Config

    @classmethod
    def check(cls, job: Job) -> None:
        for path in plugins.proxy_checks(job):
            plugins.load(path)(job)

    @classmethod
    def check_host(cls, config: Config) -> None:
        for check in plugins.named(plugins.PROXY_HOST_CHECKS, config):
            check(config)
        if config.proxy.picker:
            check_module(config.proxy.picker, key="proxy.picker")

    @classmethod
    def plugin_classes(cls, job: Job) -> tuple[type[Handles], ...]:
        return tuple(plugins.load(path) for path in plugins.proxy_hooks_of(job))

    def __init__(self, config: Config, kernel: Kernel) -> None:
        super().__init__(config, kernel)
        self._section = section = config.proxy
        self._limit = f"proxy.request_timeout_s={section.request_timeout_s:g}"
        self.requests = SharedRequests(ProxyRequest, self._begin, section.results_kept, section.results_mb, self._cancel, self._too_late)
        self.placement = placement = Placement(section.max_waiting, self._turn)
        host = PickerHost(self, config, placement.seats, self.requests.running, lambda: placement.num_waiting, placement.look)
        placement.picker = picker_of(host)
        self._roster = Roster(self, placement, self.requests, lambda seat: self._version_began(seat.info.version))
        self._started = False
        self.begin_hooks(plugins.chosen(plugins.PROXY_HOOKS, config))
        self.plugins = self.hooks
        self._newest = -1
        """The newest weight version of which a token was sampled."""

    # -- life cycle -------------------------------------------------------------------------------------------------

    async def on_start(self) -> None:
        """Learn from every ready engine what it runs and keeps, before the first request is routed."""
        self._meet()
        await self._roster.first_look()
        for hook in self.hooks:
            self._run(hook)
        self._started = True

    async def on_drain(self) -> None:
        """Answer what is answered soon. Engines go on with the rest, and its callers ask the next proxy for it, as after a death."""
        with suppress(TimeoutError):
            async with asyncio.timeout(DRAIN_S):
                await self.requests.idle.wait()

    async def on_peers(self, joined: tuple[str, ...], left: tuple[str, ...]) -> None:
        self._roster.changed(joined, left)
        self._meet()
        for hook in self.hooks:
            hook.peers_left(left)

    # -- mechanisms ---------------------------------------------------------------------------------------------------

    def came(self, hook: ProxyHook) -> None:
        if self._started:
            self._run(hook)

    def _meet(self) -> None:
        """Add the plug-ins that the actors that are there now need."""
        for role, path in plugins.PROXY_PEERS.items():
            if self.peers(role):
                self.hook(path)

    def _run(self, hook: ProxyHook) -> None:
        self.spawn(hook.run(), name=f"{self.name}.{type(hook).__name__}")

    # -- requests: no task for any of them, since there are more of these than of anything else ---------------------

    @handler(concurrency=4096)
    def generate(self, request: Generate) -> asyncio.Future[GenerateReply]:
        """Bounded by `concurrency`: above, requests stay in the mailbox and their senders run out of credit."""
        return self.requests.ask(request, within_s=budget(self._section.request_timeout_s))

    def _too_late(self, request: Generate) -> Aborted | NotItsTurn:
        """Its time is over, which says nothing against the request: it may come again."""
        shared = self.requests.running.get(request.request_id)
        for hook in self.hooks:
            if (reply := hook.too_late(request, shared)) is not None:
                return reply
        what = f"{shared.engine} had not finished it" if shared and shared.engine else "no engine had room"
        tokens = shared.tokens if shared else request.resumed
        return Aborted(request.request_id, tokens, f"{request.request_id}: {what} before the deadline")

    def _begin(self, shared: ProxyRequest) -> Run:
        """See the request through, from engine to engine if need be."""
        shared.run = asyncio.get_running_loop().create_future()
        shared.run.add_done_callback(self._went)  # before the table's own, which takes it out
        self.metrics.gauge("proxy/in_flight", len(self.requests.running))
        self._go_on(shared)
        self._came_or_went()
        return shared.run

    def _go_on(self, shared: ProxyRequest) -> None:
        """One step further: it has its answer, or gets a seat, or stands in line for one."""
        outcome = shared.outcome()
        if outcome is not None:
            self._end(shared, outcome)
        elif (seat := self.placement.try_take(shared)) is not None:
            self.ask(seat, shared)
        elif self.placement.full:
            num = self.placement.num_waiting
            why = f"{num} requests wait for an engine already: add engines, or raise proxy.max_waiting"
            self._end(shared, Aborted(shared.request.request_id, shared.tokens, why))
        else:
            shared.wait = self._waiting(shared, "a free slot", next((name.rpartition("-")[0] for name in self.peers(GENERATION)), "engine"))
            self.placement.line_up(shared)
            self.metrics.gauge("proxy/queued", self.placement.num_waiting)

    def _turn(self, shared: ProxyRequest, seat: EngineSeat | None) -> None:
        """Its wait in line is over."""
        shared.wait.close()
        self.metrics.gauge("proxy/queued", self.placement.num_waiting)
        if seat is None:
            self._go_on(shared)
        else:
            self.ask(seat, shared)

    def ask(self, seat: EngineSeat, shared: ProxyRequest, route: Route | None = None) -> None:
        """Ask the engine whose seat the request has, by the picker's route or by another."""
        request = shared.to_send(self.placement.picker.route(shared, seat) if route is None else route)
        limit_s = self._section.request_timeout_s
        wait = self._waiting(shared, "decode", seat.name)
        asking: asyncio.Future[Any] | None = seat.ref.begin(request, timeout=limit_s, trace=shared.trace)
        if asking is None:
            asking = self.spawn(self._ask_later(seat, shared, request), name=f"{self.name}.ask.{seat.name}")
        shared.asked = ask = EngineAsk(seat, asking, wait)
        asking.add_done_callback(partial(self._replied, shared, ask))

    async def _ask_later(self, seat: EngineSeat, shared: ProxyRequest, request: Generate) -> GenerateReply | AskFailed:
        """The engine is away just now, or granted no credit."""
        current_trace.set(shared.trace)
        try:
            return await seat.ref.ask(request, timeout=self._section.request_timeout_s, retry=False)
        except AskFailed as error:
            return error

    def _replied(self, shared: ProxyRequest, ask: EngineAsk, _: object) -> None:
        """The engine answered or failed, or the request was taken away from it, or this actor stops."""
        try:
            self._settle(shared, ask)
        except NotRunning:  # an actor that is ending gives no seat to requests in line
            shared.run.cancel()

    def _settle(self, shared: ProxyRequest, ask: EngineAsk) -> None:
        if shared.settles is not None:
            if not shared.settles(ask):
                return
        elif shared.asked is not ask:
            if shared.seat is not ask.seat:
                self.placement.release(ask.seat, shared)  # it dropped out a moment ago
            return
        shared.asked = None
        ask.wait.close()
        seat, asking = ask.seat, ask.future
        if asking.cancelled() and not ask.taken_away:
            shared.run.cancel()
        found: Any = None if asking.cancelled() else asking.exception() or asking.result()
        lost = found is None or isinstance(found, NotSent | Refused | Unknown)
        if lost and not shared.run.done():
            if found is not None:
                self._roster.rest(seat, str(found))
            self._goes_elsewhere(seat, shared, died=found is None or isinstance(found, Unknown))
        self.placement.release(seat, shared)
        if shared.run.done():
            return
        reply: Any = None if lost else found
        outcome = None if lost else self._answered(seat, shared, reply)
        if outcome is None:
            self.placement.picker.after(shared, seat, reply)
            self._go_on(shared)
        else:
            self._end(shared, outcome)

    def _cancel(self, shared: ProxyRequest) -> None:
        """Its last asker is gone."""
        shared.run.cancel()
        if self.placement.leave(shared):
            shared.wait.close()
            self.metrics.gauge("proxy/queued", self.placement.num_waiting)
        else:
            shared.take_away()

    def _end(self, shared: ProxyRequest, outcome: Completion | Aborted | Exception) -> None:
        self.metrics.observe("proxy/latency_s", asyncio.get_running_loop().time() - shared.began)
        self.placement.picker.ended(shared, outcome)
        for hook in self.hooks:
            hook.ended(shared, outcome)
        shared.run.set_result(outcome)

    def _went(self, run: Run) -> None:
        """A request has its answer, or its last asker left; it is still in the table."""
        self.metrics.gauge("proxy/in_flight", len(self.requests.running) - 1)
        self._came_or_went()

    def _came_or_went(self) -> None:
        for hook in self.hooks:
            hook.came_or_went()

    def _waiting(self, shared: ProxyRequest, stage: str, holder: str) -> Wait:
        request, why = shared.request, self.placement.picker.why(shared)
        return self.waits.on(request.request_id, stage=stage, detail=why, holder=holder, limit=self._limit).open()

    def _answered(
        self, seat: EngineSeat, shared: ProxyRequest, reply: GenerateReply | Exception
    ) -> Completion | Aborted | Exception | None:
        """The outcome; None where another engine is to go on with the request."""
        if isinstance(reply, Exception):
            return reply
        if reply.tokens.spans:
            self._sampled_under(seat, WeightsId(reply.tokens.spans[-1].version, shared.request.weights.adapter))
        match reply:
            case Completion() | Aborted():
                return reply
            case HandedOver(request_id, tokens, to) if to:
                self.placement.located[request_id] = to
            case HandedOver(_, tokens) | HandedBack(_, tokens) | NotItsTurn(_, tokens):
                pass
        shared.tokens = tokens
        if isinstance(reply, HandedBack | NotItsTurn) and not shared.abort_reason:
            seat.handed_back = True
            self._roster.rest(seat, "it drains")
            self._goes_elsewhere(seat, shared, died=False)
        return None

    def _goes_elsewhere(self, seat: EngineSeat, shared: ProxyRequest, *, died: bool) -> None:
        if shared.abort_reason:
            return
        seat.lost += 1
        seat.lost_tokens += shared.num_tokens
        self.metrics.count("proxy/moved")
        if died:
            shared.deaths += 1
            if shared.deaths >= self._section.max_deaths:
                shared.abort_reason = f"{shared.deaths} engines died while they ran it; it may be the cause"

    # -- what engines say -------------------------------------------------------------------------------------------

    @handler
    async def tokens_sampled(self, message: TokensSampled) -> None:
        newest: dict[str, int] = {}
        for request_id, tokens in message.progress:
            shared = self.requests.running.get(request_id)
            if shared is not None and shared.engine == message.engine:
                shared.tokens = shared.tokens.extended(tokens)
            if tokens.spans:
                name = message.names.get(request_id, "")
                newest[name] = max(newest.get(name, -1), tokens.spans[-1].version)
        seat = self.placement.seats.get(message.engine)
        if seat is not None:
            for name, version in newest.items():
                self._sampled_under(seat, WeightsId(version, name))

    def _sampled_under(self, seat: EngineSeat, weights: WeightsId) -> None:
        if (holds := seat.info.holding(weights)) is not seat.info.holds:
            self.placement.changed(seat, holds=holds)
        if not weights.adapter:
            self._version_began(weights.version)

    @handler(concurrency=16)
    async def engine_changed(self, message: InfoChanged) -> Ack:
        if (seat := self.placement.seats.get(message.info.name)) is not None:
            seat.info = msgspec.structs.replace(message.info, suspended=seat.info.suspended)  # the proxy's own command
            self.placement.changed(seat)
        for hook in self.hooks:
            hook.engine_changed(message.info)
        return Ack()

    def _version_began(self, version: int) -> None:
        """Note the first token under a new version, on any engine."""
        if version > self._newest:
            self._newest = version
            self.placement.picker.version_began(version)
            for hook in self.hooks:
                hook.version_began(version)

    # -- commands ---------------------------------------------------------------------------------------------------

    @handler(concurrency=64)
    async def abort(self, request: Abort) -> Ack:
        """The asker of the request gets Aborted with its tokens; answered once the engine carried it out, or is gone."""
        shared = self.requests.running.get(request.request_id)
        if shared is None or shared.abort_reason:
            return Ack()
        shared.abort_reason = request.reason
        if shared.asked is None:
            if self.placement.leave(shared):
                self._turn(shared, None)
            return Ack()
        for seat in [ask.seat for ask in shared.asks]:
            if seat.gone or not await self._roster.command(seat, request):
                shared.take_away(seat)
        return Ack()

    @handler(concurrency=4)
    async def suspend(self, request: Suspend) -> Ack:
        """Answered when no engine decodes any more; engines that join later are suspended too."""
        await self._roster.command_all(request)
        return Ack()

    @handler(concurrency=4)
    async def resume(self, request: Resume) -> Ack:
        await self._roster.command_all(request)
        return Ack()


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
        """Take every request away from an engine that left; they go to others with the tokens they have."""
        seat.gone = True
        requests = list(seat.requests.values())
        for shared in requests:
            shared.take_away(seat)
        num = seat.lost + len(requests)
        tokens = seat.lost_tokens + sum(shared.num_tokens for shared in requests)
        if num:
            to = ", ".join(sorted(self.placement.seats)) or "the next engine that is ready"
            verb = "was drained" if seat.handed_back else "is gone"
            what = "1 request goes" if num == 1 else f"{num} requests go"
            self.actor.notice(f"{seat.name} {verb}: {what} to {to} with the {tokens} tokens sampled so far")
        self.actor.log.info("engine_left", engine=seat.name, requests=num, tokens=tokens)

    async def _wake(self, seat: EngineSeat) -> None:
        await asyncio.sleep(REST_S)
        seat.resting = False
        self.placement.changed(seat)
