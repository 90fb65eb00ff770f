"""LLMProxy: routes requests to engines; every request lives on exactly one engine and outlives it."""

import asyncio
from contextlib import suppress
from functools import partial
from typing import Any

from actors.cluster import ClusterSection, check_pools
from actors.config import ProxySection
from actors.messages.engines import GENERATION, EngineState
from actors.messages.fabric import PhaseIntent
from actors.messages.generation import (
    HANDED_BACK,
    HANDED_OVER,
    NOT_ITS_TURN,
    Abort,
    Aborted,
    Completion,
    Generate,
    MovedFrom,
    Resume,
    Suspend,
    Tokens,
    TokensSampled,
    VersionSpan,
)
from actors.messages.moves import Move, Moved, NotMoved
from actors.messages.orchestration import OutOfDate, Survey, Surveyed
from actors.messages.phases import Generating
from actors.proxy.affinity import AffinityMap, HardwareAffinity, check_affinity
from actors.proxy.moves import Moves
from actors.proxy.outlook import Outlook
from actors.proxy.permit import RolloutPermit, check_cluster
from actors.proxy.placement import EngineSeat, Placement, ProxyRequest, Roster
from actors.proxy.stages import DECODE, PREFILL, Stages, check_stages
from actors.requests import Run, SharedRequests
from bus.errors import AskFailed, NotSent, Refused, Unknown
from bus.message import Ack, Message
from runtime.actor import Actor, handler
from runtime.config import ActorConfig
from runtime.config import Config as Job
from runtime.courier import budget, current_trace
from runtime.errors import NotRunning
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

    class Config(ActorConfig):
        proxy: ProxySection = ProxySection()
        cluster: ClusterSection = ClusterSection()
        affinity: AffinityMap = {}
        """Which class of hardware serves which task: `learned`, or task → class of a pool, `default` for the others; see docs/affinity.md."""

    config: Config

    @classmethod
    def check(cls, job: Job) -> None:
        check_affinity(job)
        check_stages(job)
        check_cluster(job)

    @classmethod
    def check_host(cls, config: Config) -> None:
        """A pool that its cluster does not have would be nobody else's."""
        check_pools(config.cluster)

    def __init__(self, config: Config, kernel: Kernel) -> None:
        super().__init__(config, kernel)
        self._section = section = config.proxy
        self._limit = f"proxy.request_timeout_s={section.request_timeout_s:g}"
        self._requests = SharedRequests(
            ProxyRequest, self._begin, section.results_kept, section.results_mb, self._cancel, self._too_late
        )
        self._affinity = None
        if config.affinity:
            self._affinity = HardwareAffinity(self, config.affinity, self._requests.running, section.sessions_kept)
        self._stages = Stages(self, section.balance_s if section.balance == "auto" else 0.0)
        self._placement = Placement(
            section.max_waiting, section.sessions_kept, self._turn, self._stages, self._affinity
        )
        self._roster = Roster(self, self._placement, self._requests, lambda seat: self._begin_phase(seat.version))
        self._outlook = Outlook(self._requests.running, self._placement.seats)
        self._moves = Moves(self, self._placement, self._requests.running, self._ask)
        self._permit = None
        if config.cluster.dir:
            self._permit = RolloutPermit(self, config.cluster, self._placement, self._requests.running, self._moves)
        self._phase = -1
        """The newest weight version whose rollout phase was announced to the fabric."""

    # -- life cycle -------------------------------------------------------------------------------------------------

    async def on_start(self) -> None:
        """Learn from every ready engine what it runs and keeps, before the first request is routed."""
        await self._roster.first_look()
        if self._permit is not None:
            self.spawn(self._permit.serve(), name=f"{self.name}.permit")

    async def on_drain(self) -> None:
        """Answer what is answered soon. Engines go on with the rest, and its callers ask the next proxy for it, as after a death."""
        with suppress(TimeoutError):
            async with asyncio.timeout(DRAIN_S):
                await self._requests.idle.wait()

    async def on_peers(self, joined: tuple[str, ...], left: tuple[str, ...]) -> None:
        self._roster.changed(joined, left)
        if self._permit is not None:
            self._permit.left(left)

    # -- requests: no task for any of them, since there are more of these than of anything else ---------------------

    @handler(concurrency=4096)
    def generate(self, request: Generate) -> asyncio.Future[Completion | Aborted]:
        """Bounded by `concurrency`: above, requests stay in the mailbox and their senders run out of credit."""
        return self._requests.ask(request, within_s=budget(self._section.request_timeout_s))

    def _too_late(self, request: Generate) -> Aborted:
        """Its deadline passed, which says nothing against the request: it may come again."""
        shared = self._requests.running.get(request.request_id)
        if self._permit is not None and not self._permit.is_held:
            return Aborted(request.request_id, shared.tokens if shared else request.resumed, NOT_ITS_TURN)
        what = f"{shared.engine} had not finished it" if shared and shared.engine else "no engine had room"
        tokens = shared.tokens if shared else request.resumed
        return Aborted(request.request_id, tokens, f"{request.request_id}: {what} before the deadline")

    def _begin(self, shared: ProxyRequest) -> Run:
        """See the request through, from engine to engine if need be."""
        shared.run = asyncio.get_running_loop().create_future()
        self.metrics.gauge("proxy/in_flight", len(self._requests.running))
        self._go_on(shared)
        self._came_or_went()
        return shared.run

    def _go_on(self, shared: ProxyRequest) -> None:
        """One step further: it has its answer, or gets a seat, or stands in line for one."""
        outcome = shared.outcome()
        if outcome is not None:
            self._end(shared, outcome)
        elif (seat := self._placement.try_take(shared)) is not None:
            self._ask(seat, shared)
        elif self._placement.full:
            num = self._placement.num_waiting
            why = f"{num} requests wait for an engine already: add engines, or raise proxy.max_waiting"
            self._end(shared, Aborted(shared.request.request_id, shared.tokens, why))
        else:
            shared.wait = self._waiting(
                shared, "a free slot", next((name.rpartition("-")[0] for name in self.peers(GENERATION)), "engine")
            )
            self._placement.line_up(shared)
            self.metrics.gauge("proxy/queued", self._placement.num_waiting)

    def _turn(self, shared: ProxyRequest, seat: EngineSeat | None) -> None:
        """Its wait in line is over."""
        shared.wait.close()
        self.metrics.gauge("proxy/queued", self._placement.num_waiting)
        if seat is None:
            self._go_on(shared)
        else:
            self._ask(seat, shared)

    def _ask(self, seat: EngineSeat, shared: ProxyRequest, moved: MovedFrom | None = None) -> None:
        request = shared.to_send(moved, hand_over=self._stages.hands_over(shared, seat.name))
        limit_s = self._section.request_timeout_s
        seat.bytes_in += len(request.prompt) + len(request.resumed.ids)
        shared.wait = self._waiting(shared, "decode", seat.name)
        asking: asyncio.Future[Any] | None = seat.ref.begin(request, timeout=limit_s, trace=shared.trace)
        if asking is None:
            asking = self.spawn(self._ask_later(seat, shared, request), name=f"{self.name}.ask.{seat.name}")
        shared.asking, shared.taken_away = asking, False
        asking.add_done_callback(partial(self._replied, seat, shared))

    async def _ask_later(
        self, seat: EngineSeat, shared: ProxyRequest, request: Generate
    ) -> Completion | Aborted | AskFailed:
        """The engine is away just now, or granted no credit."""
        current_trace.set(shared.trace)
        try:
            return await seat.ref.ask(request, timeout=self._section.request_timeout_s, retry=False)
        except AskFailed as error:
            return error

    def _replied(self, seat: EngineSeat, shared: ProxyRequest, asking: "asyncio.Future[Any]") -> None:
        """The engine answered or failed, or the request was taken away from it, or this actor stops."""
        try:
            self._settle(seat, shared, asking)
        except NotRunning:  # nor does whoever stands in line get a seat from an actor that is ending
            shared.run.cancel()

    def _settle(self, seat: EngineSeat, shared: ProxyRequest, asking: "asyncio.Future[Any]") -> None:
        if not self._moves.is_settled(seat, shared, asking):
            return
        shared.asking = None
        shared.wait.close()
        if asking.cancelled() and not shared.taken_away:
            shared.run.cancel()
        found: Any = None if asking.cancelled() else asking.exception() or asking.result()
        lost = found is None or isinstance(found, NotSent | Refused | Unknown)
        if lost and not shared.run.done():
            if found is not None:
                self._roster.rest(seat, str(found))
            self._moved(seat, shared, died=found is None or isinstance(found, Unknown))
        self._placement.release(seat, shared)
        if shared.run.done():
            return
        if isinstance(found, Completion | Aborted):
            found = self._answered(seat, shared, found)
        if lost or found is None:
            self._go_on(shared)
        else:
            self._end(shared, found)

    def _cancel(self, shared: ProxyRequest) -> None:
        """Nobody waits for it any more."""
        shared.run.cancel()
        if self._placement.leave(shared):
            shared.wait.close()
            self.metrics.gauge("proxy/queued", self._placement.num_waiting)
        else:
            shared.take_away()

    def _end(self, shared: ProxyRequest, outcome: Completion | Aborted | Exception) -> None:
        self.metrics.observe("proxy/latency_s", asyncio.get_running_loop().time() - shared.began)
        self.metrics.gauge("proxy/in_flight", len(self._requests.running) - 1)
        if self._affinity is not None:
            self._affinity.ended(shared.request, outcome)
        if self._outlook.epoch:
            self._outlook.ended(shared, outcome)
        shared.run.set_result(outcome)
        self._came_or_went()

    def _came_or_went(self) -> None:
        if self._permit is not None:
            self._permit.look()

    def _waiting(self, shared: ProxyRequest, stage: str, holder: str) -> Wait:
        request = shared.request
        why = "" if self._affinity is None else self._affinity.told(request.task)
        return self.waits.on(request.request_id, stage=stage, detail=why, holder=holder, limit=self._limit).open()

    def _answered(
        self, seat: EngineSeat, shared: ProxyRequest, reply: Completion | Aborted
    ) -> Completion | Aborted | None:
        """What the reply tells about its engine; None where the engine handed the request back."""
        seat.bytes_out += len(reply.tokens.ids) + len(reply.tokens.logprobs)
        if reply.tokens.spans:
            self._sampled_under(seat, reply.tokens.spans[-1].version)
        if isinstance(reply, Aborted) and reply.moved_to:
            shared.tokens = reply.tokens
            self._placement.located[reply.request_id] = reply.moved_to
            return None
        if isinstance(reply, Completion) or reply.reason not in (HANDED_BACK, HANDED_OVER) or shared.abort_reason:
            return reply
        shared.tokens = reply.tokens
        if reply.reason == HANDED_OVER:
            shared.enter(DECODE, seat.name)
            return None
        seat.handed_back = True
        self._roster.rest(seat, reply.reason)
        self._moved(seat, shared, died=False)
        return None

    def _moved(self, seat: EngineSeat, shared: ProxyRequest, *, died: bool) -> None:
        if shared.abort_reason:
            return
        shared.enter(PREFILL)
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
    async def engine_state(self, message: EngineState) -> Ack:
        if (seat := self._placement.seats.get(message.engine)) is not None:
            seat.version, seat.held = message.version, message.held
            seat.asleep, seat.degree, seat.restart_s = message.asleep, message.degree, message.restart_s
            self._placement.changed(seat)
        if self._permit is not None and message.asleep:
            self._permit.slept(message.engine)
        return Ack()

    def _begin_phase(self, version: int) -> None:
        """The first token under a new version, on any engine, begins its rollout phase: the fabric hears of it, and of the last one's traffic."""
        if version <= self._phase:
            return
        self._phase = version
        if self._affinity is not None:
            self._affinity.phase()
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

    @handler(concurrency=16)
    async def generating(self, message: Generating) -> Ack:
        if self._permit is not None:
            self._permit.told(message.manager, message.num)
        return Ack()

    # -- commands ---------------------------------------------------------------------------------------------------

    @handler(concurrency=64)
    async def abort(self, request: Abort) -> Ack:
        """The asker of the request gets Aborted with its tokens; answered once the engine carried it out, or is gone."""
        shared = self._requests.running.get(request.request_id)
        if shared is None or shared.abort_reason:
            return Ack()
        shared.abort_reason = request.reason
        if shared.asking is None:
            if self._placement.leave(shared):
                self._turn(shared, None)
            return Ack()
        for seat in filter(None, (shared.behind and shared.behind.seat, shared.seat)):
            if seat.gone or not await self._roster.command(seat, request):
                shared.take_away(seat)
        return Ack()

    @handler(concurrency=64)
    async def move(self, request: Move) -> Moved | NotMoved:
        """Answered once another engine has the request, or it is clear that none will; who asked for it hears of neither."""
        if self._outlook.is_old(request.epoch):
            return NotMoved(f"an order of epoch {request.epoch}: a later orchestrator is at work")
        return await self._moves.move(request)

    @handler
    async def survey(self, request: Survey) -> Surveyed | OutOfDate:
        return self._outlook.look(request)

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
