"""Orders of an engine on a pool that jobs share: it computes only under the pool's permit, and asks the cluster's Store itself."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager

from actors.cluster import ROLLOUT, WEIGHT_SYNC, ClusterSection, permits_of, place_of
from actors.engines.engine import SLEEP, Engine, EngineError, require
from actors.engines.orders import Orders
from actors.messages.engines import SleepEngine
from actors.permits import Grant, PermitLost, Permits
from runtime.actor import Actor
from runtime.store.errors import StoreUnavailable


class PermittedOrders(Orders):
    """The proxy holds the permit; this follows it. An engine whose permit is lost goes to sleep by itself, whoever has it told to wake."""

    def __init__(self, actor: Actor, section: ClusterSection, tell: Callable[[], Awaitable[None]]) -> None:
        super().__init__(actor.name, tell)
        self._actor, self._section = actor, section
        self._permits: asyncio.Future[Permits]
        self._grant: Grant | None = None
        self._place = place_of(actor.name)

    async def begin(self, engine: Engine) -> None:
        """It sleeps until the first permit."""
        require(engine, SLEEP)
        await engine.sleep()
        self._permits = asyncio.get_running_loop().create_future()
        self._actor.spawn(self._reach(), name=f"{self._actor.name}.cluster")

    async def _reach(self) -> None:
        async with permits_of(self._section) as permits:
            self._permits.set_result(permits)
            await asyncio.Event().wait()

    @asynccontextmanager
    async def weight_sync(self) -> AsyncGenerator[Callable[[], bool]]:
        """One transfer at a time over the link that the cluster's jobs share; tells by the engine's own clock whether that is certain."""
        member = f"{self._section.job}.{self._actor.name}"
        async with AsyncExitStack() as held:
            with self._actor.waits.on("permit", stage=WEIGHT_SYNC, detail="the link for weights") as wait:
                permits = await self._permits
                wait.described_by(lambda: permits.why(WEIGHT_SYNC))
                grant = await held.enter_async_context(permits.hold(WEIGHT_SYNC, WEIGHT_SYNC, member))
            yield lambda: grant.is_held

    async def _wake(self, engine: Engine, epoch: int) -> float:
        """Raises EngineError where `epoch` does not hold the pool, or nobody knows: it is an order of a permit that is over."""
        section = self._section
        try:
            grant = await (await self._permits).follow(section.rollout_pool, epoch, self._place)
        except (PermitLost, StoreUnavailable) as error:
            raise EngineError(str(error)) from error
        if self._grant is None or self._grant.epoch != epoch or self._grant.lost.is_set():
            self._grant = grant
            self._actor.spawn(self._guard(engine, grant), name=f"{self._actor.name}.permit")
        seconds = await super()._wake(engine, epoch)
        self._actor.log.info("woke", phase=ROLLOUT, epoch=epoch, seconds=seconds)
        return seconds

    async def _guard(self, engine: Engine, grant: Grant) -> None:
        """Look after the permit until it is gone; an engine that still has it then sleeps at once."""
        await (await self._permits).watch(grant, self._place)
        if self._grant is grant and not engine.load().asleep:
            self._actor.log.warning("permit_lost", pool=grant.pool, phase=ROLLOUT, epoch=grant.epoch)
            await self.carry_out(engine, SleepEngine())
