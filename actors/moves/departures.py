"""Requests that leave this engine for another one, and requests that come from one.

What becomes of a request that was parked is decided in one place and once: in `Departures`, here at its source. So neither the death of
the proxy nor that of the target, at whatever time, lets two engines go on with it, or none.
"""

import asyncio
from collections import OrderedDict
from contextlib import suppress
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from rubato.actors.engines.engine import CACHE, EXPORT, Engine, EngineError, EngineHook, Work, capabilities
from rubato.actors.engines.weights import WeightsPuller
from rubato.actors.messages.generation import GENERATION, GenerateReply, HandedOver, MovedFrom
from rubato.actors.messages.moves import AbortMove, AwaitCaches, CachePart, FetchCache, MovePrepared, NotMoved, PrepareMove, TakeMove
from rubato.actors.moves.caches import Caches
from rubato.bus.errors import AskFailed
from rubato.bus.message import Ack
from rubato.planning.moves import Carry, Rate, Transfer, carry
from rubato.runtime.actor import Actor, handler

if TYPE_CHECKING:
    from rubato.actors.engines.worker import EngineRequest, EngineWorker

HOLD_S = 10.0
"""A parked request that its target has not taken by then is kept."""

TAKE_S = 12.0
"""A target that can't reach the source for this long, though it is there, leaves the request to it: longer than HOLD_S."""

PAUSE_S = 0.2
"""Between two attempts to reach the source."""

FATES_KEPT = 1024
"""Moves whose outcome is kept for late askers; the oldest is forgotten first."""


class OutgoingMove:
    """One move of a request, between export and its fate."""

    def __init__(self, number: int) -> None:
        loop = asyncio.get_running_loop()
        self.number = number
        self.taken: asyncio.Future[bool] = loop.create_future()
        """Its fate: True where the target goes on with it, False where this engine does."""
        self._timer = loop.call_later(HOLD_S, self.settle, False)

    @property
    def is_decided(self) -> bool:
        return self.taken.done()

    def settle(self, taken: bool) -> bool:
        """Decide its fate, unless that is decided; returns whether it is taken."""
        if not self.taken.done():
            self._timer.cancel()
            self.taken.set_result(taken)
        return self.taken.result()


class Leaving:
    """What a move has to do with one request of this engine."""

    def __init__(self) -> None:
        self.parked: OutgoingMove | None = None
        """Its last move away from here, to `target`."""
        self.target = ""
        self.exported: asyncio.Future[Work | None]
        """What the engine gives for that move, without its cache; None where it has not got the request any more."""
        self.handing_over: asyncio.Task[None] | None = None
        """After a prefill: takes it out of the engine, and keeps its cache."""


class Departures:
    """The newest move of each request that was ever to leave."""

    def __init__(self, actor: Actor, caches: Caches) -> None:
        self._actor = actor
        self._caches = caches
        self._parked: OrderedDict[str, OutgoingMove] = OrderedDict()
        self._bytes_per_token = 0.0
        self._exports = Rate()
        self._passed_over = 0
        """Number of requests that left without their KV cache since the last one that took it along."""

    async def prepare(
        self, engine: Engine, shared: "EngineRequest", leaving: Leaving, order: PrepareMove, weights: WeightsPuller
    ) -> MovePrepared | NotMoved:
        """Park a request that runs in `engine`, or still waits for `weights`."""
        name = self._actor.name
        if EXPORT not in capabilities(engine):
            return NotMoved(f"{name} can't give a request away: its engine has not the capability {EXPORT}")
        before = self._parked.get(order.request_id)
        if before is not None and (order.number <= before.number or not before.is_decided):
            return NotMoved(f"{order.request_id} moves already, or had an order of a later number")
        leaving.parked, leaving.target = OutgoingMove(order.number), order.target
        leaving.exported = asyncio.get_running_loop().create_future()
        parked = leaving.parked
        self._remember(order.request_id, parked)
        if shared.stage == "weights":
            shared.stage = ""
            weights.wake_waiters()
            return MovePrepared(shared.tokens, self._actor.incarnation, "it waits for weights: no cache")
        moving = self._moving(engine, shared, same_weights=weights.version == order.version)
        plan = carry(moving)
        if moving.same_weights:
            self._passed_over = 0 if plan.with_cache else self._passed_over + 1
        # It is seen through though the proxy may give it up before the engine's step is over: the request waits for what is exported.
        parking = self._park(engine, shared, leaving, order, plan)
        return await asyncio.shield(self._actor.spawn(parking, name=f"{name}.park"))

    async def _park(
        self, engine: Engine, shared: "EngineRequest", leaving: Leaving, order: PrepareMove, plan: Carry
    ) -> MovePrepared | NotMoved:
        loop, exported, parked = asyncio.get_running_loop(), leaving.exported, leaving.parked
        began = loop.time()
        try:
            work = await engine.export(order.request_id, with_cache=plan.with_cache and CACHE in capabilities(engine))
        except EngineError as error:
            if parked is not None:
                parked.settle(False)
            exported.set_result(None)
            return NotMoved(str(error))
        if work.cache is not None:
            self._bytes_per_token = len(work.cache.data) / work.cache.num_tokens
            self._exports.saw(len(work.cache.data), loop.time() - began)
            if not shared.run.done():
                self._caches.keep(order.request_id, work.cache, order.number)
        exported.set_result(work._replace(cache=None))
        self._actor.log.info("request_parked", request=order.request_id, target=order.target, why=plan.why)
        return MovePrepared(work.resumed, self._actor.incarnation, plan.why)

    def keep(self, request_id: str, number: int) -> None:
        """The move is off."""
        parked = self._parked.get(request_id)
        if parked is not None and parked.number == number:
            parked.settle(False)

    def take(self, request: TakeMove) -> Ack | NotMoved:
        """The target wants it."""
        parked = self._parked.get(request.request_id)
        if parked is None and request.incarnation != self._actor.incarnation:
            return Ack()
        if parked is None or parked.number != request.number or not parked.settle(True):
            return NotMoved(f"{request.request_id} stays on {self._actor.name}")
        return Ack()

    def _moving(self, engine: Engine, shared: "EngineRequest", *, same_weights: bool) -> Transfer:
        tokens = (len(shared.request.prompt) + len(shared.tokens.ids)) // 4
        ways = [rate for rate in (self._caches.link.bytes_s, self._exports.bytes_s) if rate]
        link_bytes_s = 1 / sum(1 / rate for rate in ways) if self._caches.link.bytes_s else 0.0
        prefill = engine.load().prefill_tokens_s
        return Transfer(tokens, tokens - 1, self._bytes_per_token, link_bytes_s, prefill, same_weights, self._passed_over)

    def _remember(self, request_id: str, parked: OutgoingMove) -> None:
        self._parked.pop(request_id, None)
        self._parked[request_id] = parked
        while len(self._parked) > FATES_KEPT and next(iter(self._parked.values())).is_decided:
            self._parked.popitem(last=False)

    # -- arrivals -----------------------------------------------------------------------------------------------------

    async def arrive(self, work: Work, moved: MovedFrom) -> Work | None:
        """The request is this engine's: its Work, with the cache where one came. None: it stays at its source.

        A source that is there is asked until it answers, one that is gone can't go on with it.
        """
        loop, request_id = asyncio.get_running_loop(), work.request_id
        give_up_at = loop.time() + TAKE_S
        while moved.source in self._actor.peers(GENERATION):
            reply = await self._take(moved, request_id)
            if isinstance(reply, NotMoved):
                return None
            if reply is not None:
                return work._replace(cache=await self._caches.fetch(self._actor.ref(moved.source), request_id, moved.number))
            if loop.time() > give_up_at:
                return None
            await asyncio.sleep(PAUSE_S)
        return work

    async def _take(self, moved: MovedFrom, request_id: str) -> Ack | NotMoved | None:
        """None where the source could not be reached."""
        request = TakeMove(request_id, moved.number, moved.incarnation)
        try:
            return await self._actor.ref(moved.source).ask(request, timeout=TAKE_S, retry=False)
        except AskFailed:
            return None


class EngineMoves(EngineHook):
    """Of one engine: the requests that leave it, those that come, and the caches that travel with them."""

    departures_class = Departures

    def __init__(self, worker: "EngineWorker") -> None:
        super().__init__(worker)
        self.caches = Caches(2 * worker.config.engine.num_slots)
        self.departures = self.departures_class(worker, self.caches)
        self._of: WeakKeyDictionary[EngineRequest, Leaving] = WeakKeyDictionary()

    def leaving(self, shared: "EngineRequest") -> Leaving:
        """Of that request."""
        found = self._of.get(shared)
        if found is None:
            found = self._of[shared] = Leaving()
        return found

    # -- messages -----------------------------------------------------------------------------------------------------

    @handler(concurrency=64, outlives_asker=True)
    async def prepare_move(self, request: PrepareMove) -> MovePrepared | NotMoved:
        """Goes on where the proxy died meanwhile: then no target comes for the request, and it stays here."""
        engine, weights = self.worker.started()
        shared = self.worker.requests.running.get(request.request_id)
        if shared is None or not shared.stage or shared.ending or shared.gives_up:
            return NotMoved(f"{request.request_id} is not generated by {self.worker.name}")
        return await self.departures.prepare(engine, shared, self.leaving(shared), request, weights)

    @handler(concurrency=64)
    async def abort_move(self, request: AbortMove) -> Ack:
        self.departures.keep(request.request_id, request.number)
        return Ack()

    @handler(concurrency=64)
    async def take_move(self, request: TakeMove) -> Ack | NotMoved:
        return self.departures.take(request)

    @handler(concurrency=4)
    async def await_caches(self, request: AwaitCaches) -> Ack:
        await self.caches.gone()
        return Ack()

    @handler(concurrency=256)
    async def fetch_cache(self, request: FetchCache) -> CachePart:
        return self.caches.give(request)

    # -- requests -----------------------------------------------------------------------------------------------------

    async def arrive(self, shared: "EngineRequest", work: Work) -> Work | GenerateReply:
        route, request_id = shared.request.route, work.request_id
        if route.hand_over:
            work = work._replace(first_at_once=True)
        if route.moved is None:
            return work
        arrived = await self.departures.arrive(work, route.moved)
        return HandedOver(request_id, shared.tokens, route.moved.source) if arrived is None else arrived

    async def ready(self, shared: "EngineRequest", work: Work) -> Work:
        """What was prefilled elsewhere comes along, if it is still there."""
        source = shared.request.route.cache_at
        if not source:
            return work
        if source == self.worker.name:
            return work._replace(cache=self.caches.take(work.request_id))
        with self.worker.waits.on(work.request_id, stage="kv", holder=source):
            return work._replace(cache=await self.caches.fetch(self.worker.ref(source), work.request_id))

    def sampled(self, shared: "EngineRequest") -> None:
        if shared.request.route.hand_over and (leaving := self.leaving(shared)).handing_over is None:
            keep = self._keep_cache(shared.request.request_id)
            leaving.handing_over = self.worker.spawn(keep, name=f"{self.worker.name}.hand_over")

    async def stopped(self, shared: "EngineRequest", finish_reason: str) -> Work | GenerateReply | None:
        leaving, request_id = self.leaving(shared), shared.request.request_id
        if leaving.handing_over is not None:
            await leaving.handing_over
            leaving.handing_over = None
        if finish_reason not in ("", "exported"):
            return None
        parked, work = leaving.parked, None
        if parked is not None and finish_reason:
            work = await asyncio.shield(leaving.exported)
        if parked is None or (finish_reason and work is None):  # handed over, where the engine gave it out
            return HandedOver(request_id, shared.tokens) if finish_reason else None
        if await asyncio.shield(parked.taken):
            return HandedOver(request_id, shared.tokens, leaving.target)
        leaving.parked = None
        return work and work._replace(cache=self.caches.take(request_id, parked.number))

    def aborted(self, shared: "EngineRequest") -> None:
        if (parked := self.leaving(shared).parked) is not None:
            parked.settle(False)

    def ended(self, shared: "EngineRequest") -> None:
        parked = self.leaving(shared).parked
        if parked is not None and not parked.settle(False):
            self.caches.take(shared.request.request_id, parked.number)

    def swapped(self) -> None:
        self.caches.forget()

    async def _keep_cache(self, request_id: str) -> None:
        """Take the request out between two steps; one that ended meanwhile needs it no more."""
        with suppress(EngineError):
            cache = (await self.worker.started()[0].export(request_id, with_cache=True)).cache
            if cache is not None:
                self.caches.keep(request_id, cache)
