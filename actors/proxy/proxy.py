"""LLMProxy: routes requests to engines; every request lives on exactly one engine and outlives it."""

import asyncio
from contextlib import suppress
from functools import partial
from typing import Any

import msgspec

from actors import plugins
from actors.gateway.requests import Run, SharedRequests
from actors.messages.engines import GENERATION, InfoChanged
from actors.messages.generation import (
    Abort,
    Aborted,
    Completion,
    Generate,
    GenerateReply,
    HandedBack,
    HandedOver,
    NotItsTurn,
    Resume,
    Route,
    Suspend,
    TokensSampled,
)
from actors.proxy.hooks import ProxyHook
from actors.proxy.picker import PickerHost, picker_of
from actors.proxy.placement import EngineAsk, EngineSeat, Placement, ProxyRequest
from actors.proxy.roster import Roster
from actors.proxy.section import ProxyConfig
from bus.errors import AskFailed, NotSent, Refused, Unknown
from bus.message import Ack
from planning.engine_info import WeightsId
from runtime.actor import Actor, Handles, handler
from runtime.config import Config as Job
from runtime.courier import budget, current_trace
from runtime.errors import NotRunning
from runtime.importer import check_module
from runtime.kernel import Kernel
from runtime.observe.figures import Wait

DRAIN_S = 1.0
"""Requests that take longer are not waited for: nobody begins one here meanwhile, and they may take minutes."""


class LLMProxy(Actor):
    """Routes Generate to engines. A second ask with the same request id joins the first, or gets its result."""

    role = "llm_proxy"
    least = 1
    needs = ("engine",)
    drain_order = 60

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
        self.requests = SharedRequests(
            ProxyRequest, self._begin, section.results_kept, section.results_mb, self._cancel, self._too_late
        )
        self.placement = placement = Placement(section.max_waiting, self._turn)
        host = PickerHost(
            self, config, placement.seats, self.requests.running, lambda: placement.num_waiting, placement.look
        )
        placement.picker = picker_of(host)
        self._roster = Roster(self, placement, self.requests, lambda seat: self._version_began(seat.info.version))
        self._started = False
        self.hooks: list[ProxyHook] = []
        self.plugins = self.hooks
        self._by_path: dict[str, ProxyHook] = {}
        for path in plugins.chosen(plugins.PROXY_HOOKS, config):
            self.hook(path)
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

    def plugin_for(self, tag: str) -> ProxyHook | None:
        path = plugins.PROXY_MESSAGES.get(tag)
        return None if path is None else self.hook(path)

    def hook(self, path: str) -> Any:
        """The hook of that class, which goes along from now on."""
        found = self._by_path.get(path)
        if found is None:
            found = self._by_path[path] = self.make(path)
            self.hooks.append(found)
            if self._started:
                self._run(found)
        return found

    def make(self, path: str) -> ProxyHook:
        """A new one."""
        return plugins.load(path)(self)

    def _meet(self) -> None:
        """What the actors that are there now bring with them."""
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
            shared.wait = self._waiting(
                shared, "a free slot", next((name.rpartition("-")[0] for name in self.peers(GENERATION)), "engine")
            )
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
        for hook in self.hooks:
            hook.asked(seat, request)
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
        except NotRunning:  # nor does whoever stands in line get a seat from an actor that is ending
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
        """Nobody waits for it any more."""
        shared.run.cancel()
        if self.placement.leave(shared):
            shared.wait.close()
            self.metrics.gauge("proxy/queued", self.placement.num_waiting)
        else:
            shared.take_away()

    def _end(self, shared: ProxyRequest, outcome: Completion | Aborted | Exception) -> None:
        self.metrics.observe("proxy/latency_s", asyncio.get_running_loop().time() - shared.began)
        self.metrics.gauge("proxy/in_flight", len(self.requests.running) - 1)
        self.placement.picker.ended(shared, outcome)
        for hook in self.hooks:
            hook.ended(shared, outcome)
        shared.run.set_result(outcome)
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
        for hook in self.hooks:
            hook.answered(seat, reply)
        if reply.tokens.spans:
            self._sampled_under(seat, reply.tokens.spans[-1].version)
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
        newest = -1
        for request_id, tokens in message.progress:
            shared = self.requests.running.get(request_id)
            if shared is not None and shared.engine == message.engine:
                shared.tokens = shared.tokens.extended(tokens)
            if tokens.spans:
                newest = max(newest, tokens.spans[-1].version)
        seat = self.placement.seats.get(message.engine)
        if seat is not None:
            self._sampled_under(seat, newest)

    def _sampled_under(self, seat: EngineSeat, version: int) -> None:
        if version > seat.info.version:
            self.placement.changed(seat, holds=(WeightsId(version),))
        self._version_began(version)

    @handler(concurrency=16)
    async def engine_changed(self, message: InfoChanged) -> Ack:
        if (seat := self.placement.seats.get(message.info.name)) is not None:
            seat.info = msgspec.structs.replace(message.info, suspended=seat.info.suspended)  # the proxy's own command
            self.placement.changed(seat)
        for hook in self.hooks:
            hook.engine_changed(message.info)
        return Ack()

    def _version_began(self, version: int) -> None:
        """The first token under a new version, on any engine, is told of."""
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
