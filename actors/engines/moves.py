"""Requests that leave this engine for another one, and requests that come from one.

What becomes of a request that was parked is decided in one place and once: in `Departures`, here at its source. So neither the death of
the proxy nor that of the target, at whatever time, lets two engines go on with it, or none.
"""

import asyncio
from collections import OrderedDict
from typing import TYPE_CHECKING

from actors.engines.caches import Caches
from actors.engines.engine import CACHE, EXPORT, Engine, EngineError, Work, capabilities
from actors.engines.weights import WeightsPuller
from actors.messages.engines import GENERATION
from actors.messages.generation import MovedFrom
from actors.messages.moves import AwaitCaches, MovePrepared, NotMoved, PrepareMove, TakeMove
from bus.errors import AskFailed
from bus.message import Ack
from planning.moves import Carry, Moving, Rate, carry
from runtime.actor import Actor, handler

if TYPE_CHECKING:
    from actors.engines.worker import EngineRequest

HOLD_S = 10.0
"""A parked request that its target has not taken by then is kept."""

TAKE_S = 12.0
"""A target that can't reach the source for this long, though it is there, leaves the request to it: longer than HOLD_S."""

PAUSE_S = 0.2
"""Between two attempts to reach the source."""

FATES_KEPT = 1024
"""Moves whose outcome is known for whoever asks late; the oldest is forgotten first."""


class CacheSource(Actor):
    """The part of a worker that knows which caches have still to travel."""

    _caches: Caches

    @handler(concurrency=4)
    async def await_caches(self, request: AwaitCaches) -> Ack:
        await self._caches.gone()
        return Ack()


class Parked:
    """One request of one epoch, between export and its fate."""

    def __init__(self, epoch: int) -> None:
        loop = asyncio.get_running_loop()
        self.epoch = epoch
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


class Departures:
    """The newest move of each request that was ever to leave."""

    def __init__(self, actor: Actor, caches: Caches) -> None:
        self._actor = actor
        self._caches = caches
        self._parked: OrderedDict[str, Parked] = OrderedDict()
        self._bytes_per_token = 0.0
        self._exports = Rate()
        self._passed_over = 0
        """Requests that left their caches behind, since one took its own along."""

    async def prepare(
        self, engine: Engine, shared: "EngineRequest", order: PrepareMove, weights: WeightsPuller
    ) -> MovePrepared | NotMoved:
        """Park a request that runs in `engine`, or still waits for `weights`."""
        name = self._actor.name
        if EXPORT not in capabilities(engine):
            return NotMoved(f"{name} can't give a request away: its engine has not the capability {EXPORT}")
        before = self._parked.get(order.request_id)
        if before is not None and (order.epoch <= before.epoch or not before.is_decided):
            return NotMoved(f"{order.request_id} moves already, or this is an order of before")
        parked = shared.parked = Parked(order.epoch)
        shared.exported = asyncio.get_running_loop().create_future()
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
        parking = self._park(engine, shared, order, parked, plan)
        return await asyncio.shield(self._actor.spawn(parking, name=f"{name}.park"))

    async def _park(
        self, engine: Engine, shared: "EngineRequest", order: PrepareMove, parked: Parked, plan: Carry
    ) -> MovePrepared | NotMoved:
        loop, exported = asyncio.get_running_loop(), shared.exported
        began = loop.time()
        try:
            work = await engine.export(order.request_id, with_cache=plan.with_cache and CACHE in capabilities(engine))
        except EngineError as error:
            parked.settle(False)
            exported.set_result(None)
            return NotMoved(str(error))
        if work.cache is not None:
            self._bytes_per_token = len(work.cache.data) / work.cache.num_tokens
            self._exports.saw(len(work.cache.data), loop.time() - began)
            if not shared.run.done():
                self._caches.keep(order.request_id, work.cache, order.epoch)
        exported.set_result(work._replace(cache=None))
        self._actor.log.info("request_parked", request=order.request_id, target=order.target, why=plan.why)
        return MovePrepared(work.resumed, self._actor.incarnation, plan.why)

    def keep(self, request_id: str, epoch: int) -> None:
        """The move is off."""
        parked = self._parked.get(request_id)
        if parked is not None and parked.epoch == epoch:
            parked.settle(False)

    def take(self, request: TakeMove) -> Ack | NotMoved:
        """The target wants it."""
        parked = self._parked.get(request.request_id)
        if parked is None and request.incarnation != self._actor.incarnation:
            return Ack()
        if parked is None or parked.epoch != request.epoch or not parked.settle(True):
            return NotMoved(f"{request.request_id} stays on {self._actor.name}")
        return Ack()

    def _moving(self, engine: Engine, shared: "EngineRequest", *, same_weights: bool) -> Moving:
        tokens = (len(shared.request.prompt) + len(shared.tokens.ids)) // 4
        ways = [rate for rate in (self._caches.link.bytes_s, self._exports.bytes_s) if rate]
        link_bytes_s = 1 / sum(1 / rate for rate in ways) if self._caches.link.bytes_s else 0.0
        prefill = engine.load().prefill_tokens_s
        return Moving(tokens, tokens - 1, self._bytes_per_token, link_bytes_s, prefill, same_weights, self._passed_over)

    def _remember(self, request_id: str, parked: Parked) -> None:
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
                return work._replace(
                    cache=await self._caches.fetch(self._actor.ref(moved.source), request_id, moved.epoch)
                )
            if loop.time() > give_up_at:
                return None
            await asyncio.sleep(PAUSE_S)
        return work

    async def _take(self, moved: MovedFrom, request_id: str) -> Ack | NotMoved | None:
        """None where the source could not be reached."""
        request = TakeMove(request_id, moved.epoch, moved.incarnation)
        try:
            return await self._actor.ref(moved.source).ask(request, timeout=TAKE_S, retry=False)
        except AskFailed:
            return None
