"""LLMProxy: routes requests to engines; every request lives on exactly one engine and outlives it."""

import asyncio

from actors.config import ProxySection
from actors.messages.fabric import PhaseIntent
from actors.messages.generation import (
    HANDED_BACK,
    Abort,
    Aborted,
    Completion,
    EngineHolds,
    Generate,
    Resume,
    Suspend,
    Tokens,
    TokensSampled,
    VersionSpan,
)
from actors.proxy.placement import EngineSeat, Placement, ProxyRequest, Roster
from actors.requests import SharedRequests
from bus.errors import NotSent, Refused, Unknown
from bus.message import Ack, Message
from runtime.actor import Actor, handler
from runtime.config import ActorConfig
from runtime.courier import budget
from runtime.kernel import Kernel


class LLMProxy(Actor):
    """Routes Generate to engines. A second ask with the same request id joins the first, or gets its result."""

    role = "llm_proxy"
    least = 1
    needs = ("engine",)
    drain_order = 60

    class Config(ActorConfig):
        proxy: ProxySection = ProxySection()

    config: Config

    def __init__(self, config: Config, kernel: Kernel) -> None:
        super().__init__(config, kernel)
        self._section = section = config.proxy
        self._requests = SharedRequests(
            ProxyRequest, self._run, self.spawn, max_results=section.results_kept, max_mb=section.results_mb
        )
        self._placement = Placement(section.max_waiting, section.sessions_kept)
        self._roster = Roster(self, self._placement, self._requests, lambda seat: self._begin_phase(seat.version))
        self._phase = -1
        """The newest weight version whose rollout phase was announced to the fabric."""

    # -- life cycle -------------------------------------------------------------------------------------------------

    async def on_start(self) -> None:
        """Learn from every ready engine what it runs and keeps, before the first request is routed."""
        await self._roster.first_look()

    async def on_drain(self) -> None:
        """Wait until every request is answered."""
        await self._requests.idle.wait()

    async def on_peers(self, joined: tuple[str, ...], left: tuple[str, ...]) -> None:
        self._roster.changed(joined, left)

    # -- requests ---------------------------------------------------------------------------------------------------

    @handler(concurrency=4096)
    async def generate(self, request: Generate) -> Completion | Aborted:
        """Bounded by `concurrency`: above, requests stay in the mailbox and their senders run out of credit."""
        try:
            async with asyncio.timeout(budget(self._section.request_timeout_s)):
                return await self._requests.ask(request)
        except TimeoutError:
            # Its deadline passed, which says nothing against the request: it may come again.
            return self._too_late(request)

    def _too_late(self, request: Generate) -> Aborted:
        shared = self._requests.running.get(request.request_id)
        what = f"{shared.engine} had not finished it" if shared and shared.engine else "no engine had room"
        tokens = shared.tokens if shared else request.resumed
        return Aborted(request.request_id, tokens, f"{request.request_id}: {what} before the deadline")

    async def _run(self, shared: ProxyRequest) -> Completion | Aborted:
        """See the request through, from engine to engine if need be."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        self.metrics.gauge("proxy/in_flight", len(self._requests.running))
        try:
            while (outcome := shared.outcome()) is None:
                seat = self._placement.try_take(shared) or await self._wait_for_seat(shared)
                if seat is not None and (outcome := await self._run_on(seat, shared)) is not None:
                    break
            self.metrics.observe("proxy/latency_s", loop.time() - began)
            return outcome
        finally:
            self.metrics.gauge("proxy/in_flight", len(self._requests.running) - 1)

    async def _wait_for_seat(self, shared: ProxyRequest) -> EngineSeat | None:
        if self._placement.full:
            num = self._placement.num_waiting
            shared.abort_reason = f"{num} requests wait for an engine already: add engines, or raise proxy.max_waiting"
            return None
        self.metrics.gauge("proxy/queued", self._placement.num_waiting + 1)
        limit = f"proxy.request_timeout_s={self._section.request_timeout_s:g}"
        try:
            with self.waits.on(shared.request.request_id, stage="a free slot", holder="engine", limit=limit):
                return await self._placement.take(shared)
        finally:
            self.metrics.gauge("proxy/queued", self._placement.num_waiting)

    async def _run_on(self, seat: EngineSeat, shared: ProxyRequest) -> Completion | Aborted | None:
        """The engine's answer; None when the request has to go on elsewhere (or ends by its own `outcome`)."""
        if seat.gone or shared.abort_reason:
            self._placement.release(seat, shared)
            return None
        request = shared.to_send()
        seat.bytes_in += len(request.prompt) + len(request.resumed.ids)
        limit_s = self._section.request_timeout_s
        limit = f"proxy.request_timeout_s={limit_s:g}"
        try:
            with self.waits.on(request.request_id, stage="decode", holder=seat.name, limit=limit):
                async with asyncio.timeout(None) as shared.asking:
                    reply = await seat.ref.ask(request, timeout=limit_s, retry=False)
        except TimeoutError:
            self._moved(seat, shared, died=True)
            return None
        except (NotSent, Refused, Unknown) as error:
            self._roster.rest(seat, str(error))
            self._moved(seat, shared, died=isinstance(error, Unknown))
            return None
        finally:
            shared.asking = None
            self._placement.release(seat, shared)
        return self._answered(seat, shared, reply)

    def _answered(
        self, seat: EngineSeat, shared: ProxyRequest, reply: Completion | Aborted
    ) -> Completion | Aborted | None:
        """What the reply tells about its engine; None where the engine handed the request back."""
        seat.bytes_out += len(reply.tokens.ids) + len(reply.tokens.logprobs)
        if reply.tokens.spans:
            self._sampled_under(seat, reply.tokens.spans[-1].version)
        if isinstance(reply, Completion) or reply.reason != HANDED_BACK or shared.abort_reason:
            return reply
        shared.tokens = reply.tokens
        seat.handed_back = True
        self._roster.rest(seat, reply.reason)
        self._moved(seat, shared, died=False)
        return None

    def _moved(self, seat: EngineSeat, shared: ProxyRequest, *, died: bool) -> None:
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
            shared = self._requests.running.get(request_id)
            if shared is not None and shared.engine == message.engine:
                shared.tokens = extend(shared.tokens, tokens)
            if tokens.spans:
                newest = max(newest, tokens.spans[-1].version)
        seat = self._placement.seats.get(message.engine)
        if seat is not None:
            self._sampled_under(seat, newest)

    def _sampled_under(self, seat: EngineSeat, version: int) -> None:
        if version > seat.version:
            seat.version = version
            self._placement.changed(seat)
        self._begin_phase(version)

    @handler(concurrency=16)
    async def engine_holds(self, message: EngineHolds) -> Ack:
        if (seat := self._placement.seats.get(message.engine)) is not None:
            seat.version, seat.held = message.version, message.held
            self._placement.changed(seat)
        return Ack()

    def _begin_phase(self, version: int) -> None:
        """The first token under a new version, on any engine, begins its rollout phase: the fabric hears of it, and of the last one's traffic."""
        if version <= self._phase:
            return
        self._phase = version
        traffic: list[tuple[str, str, int]] = []
        for seat in self._placement.seats.values():
            traffic += [(self.name, seat.name, seat.bytes_in), (seat.name, self.name, seat.bytes_out)]
            seat.bytes_in = 0
            seat.bytes_out = 0
        if self.peers("fabric_controller"):
            intent = PhaseIntent("rollout", version, 0.0, tuple(t for t in traffic if t[2]))
            self.spawn(self._tell("fabric_controller", intent), name=f"{self.name}.phase")

    async def _tell(self, target: str, message: Message) -> None:
        try:
            await self.ref(target).tell(message)
        except NotSent:
            self.log.debug("not_told", target=target, message=type(message).__name__)

    # -- commands ---------------------------------------------------------------------------------------------------

    @handler(concurrency=64)
    async def abort(self, request: Abort) -> Ack:
        """The asker of the request gets Aborted with its tokens; answered once the engine carried it out, or is gone."""
        shared = self._requests.running.get(request.request_id)
        if shared is None or shared.abort_reason:
            return Ack()
        shared.abort_reason = request.reason
        seat = self._placement.seats.get(shared.engine)
        if shared.asking is None:
            self._placement.abort(shared)
        elif seat is None or not await self._roster.command(seat, request):
            shared.take_away()
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


def extend(tokens: Tokens, more: Tokens) -> Tokens:
    """`tokens` and what `more` adds at their end; `more` has positions in the whole completion.

    Overlaps are cut. A gap (a report was missed) adds nothing: what follows it will be sampled again.
    """
    have = len(tokens.ids) // 4
    if not more.spans or not more.spans[0].start <= have < more.spans[-1].end:
        return tokens
    skip = (have - more.spans[0].start) * 4
    spans = list(tokens.spans)
    for version, start, end in ((s.version, max(s.start, have), s.end) for s in more.spans if s.end > have):
        if spans and spans[-1].version == version:
            spans[-1] = VersionSpan(version, spans[-1].start, end)
        else:
            spans.append(VersionSpan(version, start, end))
    return Tokens(tokens.ids + more.ids[skip:], tokens.logprobs + more.logprobs[skip:], tuple(spans))
