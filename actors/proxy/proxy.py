"""LLMProxy: owns the in-flight table; every request lives on exactly one engine and outlives it."""

import asyncio

from actors.messages.generation import (
    HANDED_BACK,
    Abort,
    Aborted,
    Completion,
    Generate,
    Resume,
    Suspend,
    TokensSampled,
)
from actors.messages.weights import WeightsPublished
from actors.proxy.inflight import InFlight, ProxyRequest, extend
from actors.proxy.phases import RolloutPhases
from actors.proxy.placement import EngineSeat, Placement
from actors.proxy.roster import Roster
from actors.proxy.section import ProxySection
from actors.proxy.sessions import Sessions
from bus.errors import NotSent, Refused, Unknown
from bus.message import Ack, Message
from runtime.actor import Actor, Context, handler
from runtime.config import ActorConfig
from runtime.courier import budget


class LLMProxy(Actor):
    """Routes Generate to engines. A second ask with the same request id joins the first or gets its result."""

    role = "llm_proxy"
    least = 1
    needs = ("engine",)
    drain_order = 60

    class Config(ActorConfig):
        proxy: ProxySection = ProxySection()

    config: Config

    def __init__(self, config: Config, context: Context) -> None:
        super().__init__(config, context)
        self._section = section = config.proxy
        self._flights = InFlight(section.results_kept, section.results_mb << 20)
        self._placement = Placement(Sessions(section.sessions_kept), section.max_waiting)
        self._phases = RolloutPhases(self.name)
        self._roster = Roster(self, self._placement, self._flights, lambda seat: self._begin_phase(seat.version))

    # -- life cycle -------------------------------------------------------------------------------------------------

    async def on_start(self) -> None:
        """Learn from every ready engine what it runs and keeps, before the first request is routed."""
        await self._roster.first_look()

    async def on_drain(self) -> None:
        """Wait until every request is answered."""
        await self._flights.idle.wait()

    async def on_peers(self, joined: tuple[str, ...], left: tuple[str, ...]) -> None:
        self._roster.changed(joined, left)

    # -- requests ---------------------------------------------------------------------------------------------------

    @handler(concurrency=4096)
    async def generate(self, request: Generate) -> Completion | Aborted:
        """Bounded by `concurrency`: above, requests stay in the mailbox and their senders run out of credit."""
        result = self._flights.result(request.request_id)
        if result is not None:
            return result
        flight = self._flights.open(request)
        if not flight.driven:
            return await self._drive(flight)
        flight.joined += 1
        try:
            while flight.driven:
                if flight.freed is None:
                    flight.freed = asyncio.Event()
                await flight.freed.wait()
            # Either there is a result now, or the one who drove it was cancelled and this asker takes over.
            return flight.result or await self._drive(flight)
        finally:
            flight.joined -= 1
            self._flights.close(flight)

    async def _drive(self, flight: ProxyRequest) -> Completion | Aborted:
        """See the flight through, from engine to engine if need be."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        deadline = began + budget(self._section.request_timeout_s)
        flight.driven = True
        self.metrics.gauge("proxy/in_flight", len(self._flights))
        try:
            while (outcome := flight.outcome()) is None:
                seat = self._placement.try_take(flight) or await self._wait_for_seat(flight, deadline)
                if seat is not None and (outcome := await self._run_on(seat, flight, deadline)) is not None:
                    break
            self._flights.finish(flight, outcome)
            self.metrics.observe("proxy/latency_s", loop.time() - began)
            return outcome
        except (NotSent, Refused, Unknown) as error:
            # Its deadline passed, which says nothing against the request: it may come again.
            return Aborted(flight.request.request_id, flight.tokens, str(error))
        finally:
            self._flights.leave(flight)
            self.metrics.gauge("proxy/in_flight", len(self._flights))

    async def _wait_for_seat(self, flight: ProxyRequest, deadline: float) -> EngineSeat | None:
        if self._placement.full:
            num = self._placement.num_waiting
            flight.abort_reason = f"{num} requests wait for an engine already: add engines, or raise proxy.max_waiting"
            return None
        self.metrics.gauge("proxy/queued", self._placement.num_waiting + 1)
        limit = f"proxy.request_timeout_s={self._section.request_timeout_s:g}"
        try:
            with self.waits.on(flight.request.request_id, stage="a free slot", holder="engine", limit=limit):
                return await self._placement.take(flight, deadline)
        finally:
            self.metrics.gauge("proxy/queued", self._placement.num_waiting)

    async def _run_on(self, seat: EngineSeat, flight: ProxyRequest, deadline: float) -> Completion | Aborted | None:
        """The engine's answer; None when the request has to go on elsewhere (or ends by its own `outcome`)."""
        if seat.gone or flight.abort_reason:
            self._placement.release(seat, flight)
            return None
        loop = asyncio.get_running_loop()
        request = flight.to_send()
        seat.bytes_in += len(request.prompt) + len(request.resumed.ids)
        limit = f"proxy.request_timeout_s={self._section.request_timeout_s:g}"
        try:
            with self.waits.on(request.request_id, stage="decode", holder=seat.name, limit=limit):
                async with asyncio.timeout(None) as flight.scope:
                    reply = await seat.ref.ask(request, timeout=deadline - loop.time(), retry=False)
        except TimeoutError:
            self._moved(seat, flight, died=True)
            return None
        except (NotSent, Refused, Unknown) as error:
            if loop.time() >= deadline:
                self._roster.abort_at(seat, request.request_id, "its deadline passed")
                raise
            self._roster.rest(seat, str(error))
            self._moved(seat, flight, died=isinstance(error, Unknown))
            return None
        finally:
            flight.scope = None
            self._placement.release(seat, flight)
        return self._answered(seat, flight, reply)

    def _answered(
        self, seat: EngineSeat, flight: ProxyRequest, reply: Completion | Aborted
    ) -> Completion | Aborted | None:
        """What the reply tells about its engine; None where the engine handed the request back."""
        seat.bytes_out += len(reply.tokens.ids) + len(reply.tokens.logprobs)
        if reply.tokens.spans:
            self._sampled_under(seat, reply.tokens.spans[-1].version)
        if isinstance(reply, Completion) or reply.reason != HANDED_BACK or flight.abort_reason:
            return reply
        flight.tokens = reply.tokens
        seat.handed_back = True
        self._roster.rest(seat, reply.reason)
        self._moved(seat, flight, died=False)
        return None

    def _moved(self, seat: EngineSeat, flight: ProxyRequest, *, died: bool) -> None:
        if flight.abort_reason:
            return
        seat.lost += 1
        seat.lost_tokens += flight.num_tokens
        self.metrics.count("proxy/moved")
        if died:
            flight.deaths += 1
            if flight.deaths >= self._section.max_deaths:
                flight.abort_reason = f"{flight.deaths} engines died while they ran it; it may be the cause"

    # -- what engines say -------------------------------------------------------------------------------------------

    @handler
    async def tokens_sampled(self, message: TokensSampled) -> None:
        newest = -1
        for request_id, tokens in message.progress:
            flight = self._flights.find(request_id)
            if flight is not None and flight.engine == message.engine:
                flight.tokens = extend(flight.tokens, tokens)
            if tokens.spans:
                newest = max(newest, tokens.spans[-1].version)
        seat = self._placement.seats.get(message.engine)
        if seat is not None:
            self._sampled_under(seat, newest)

    @handler
    async def weights_published(self, message: WeightsPublished) -> None:
        """A hint only: an engine holds a version once it sampled under it, which its tokens say."""
        self.metrics.gauge("proxy/published_version", message.version)

    def _sampled_under(self, seat: EngineSeat, version: int) -> None:
        if version > seat.version:
            seat.version = version
            self._placement.changed(seat)
            self._begin_phase(version)

    def _begin_phase(self, version: int) -> None:
        intent = self._phases.begins(version, self._placement.seats.values())
        if intent is not None and self.peers("fabric_controller"):
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
        flight = self._flights.find(request.request_id)
        if flight is None or flight.abort_reason:
            return Ack()
        flight.abort_reason = request.reason
        seat = self._placement.seats.get(flight.engine)
        if flight.scope is None:
            self._placement.abort(flight)
        elif seat is None or not await self._roster.command(seat, request):
            flight.take_away()
        return Ack()

    @handler(concurrency=4)
    async def suspend(self, request: Suspend) -> Ack:
        """Answered when no engine decodes any more; engines that join later are suspended too."""
        await self._roster.suspend_all(request)
        return Ack()

    @handler(concurrency=4)
    async def resume(self, request: Resume) -> Ack:
        await self._roster.suspend_all(request)
        return Ack()
