"""Orders of an engine on a pool that jobs share: it computes only under the pool's permit, and asks the cluster's Store itself."""

from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from actors.cluster import ROLLOUT, WEIGHT_SYNC, place_of
from actors.cluster.lease import PoolLease
from actors.engines.engine import SLEEP, Engine, EngineError, require
from actors.messages.engines import SleepEngine
from actors.moves.orders import Orders
from actors.permits import Grant, PermitLost
from runtime.store.errors import StoreUnavailable

if TYPE_CHECKING:
    from actors.engines.worker import EngineWorker


class PermittedOrders(Orders):
    """The proxy holds the permit; this follows it. An engine whose permit is lost goes to sleep by itself, whoever has it told to wake."""

    def __init__(self, worker: "EngineWorker") -> None:
        super().__init__(worker)
        self._actor, self._lease = worker, PoolLease(worker, worker.config.cluster)
        self._grant: Grant | None = None
        self._place = place_of(worker.name)

    async def begin(self, engine: Engine) -> None:
        """It sleeps until the first permit."""
        require(engine, SLEEP)
        await engine.sleep()
        self._lease.begin()

    @asynccontextmanager
    async def weight_sync(self) -> AsyncGenerator[Callable[[], bool]]:
        """One transfer at a time over the link that the cluster's jobs share; tells by the engine's own clock whether that is certain."""
        async with self._lease(WEIGHT_SYNC) as grant:
            yield lambda: grant.is_held

    async def _wake(self, engine: Engine, epoch: int) -> float:
        """Raises EngineError where `epoch` does not hold the pool, or nobody knows: it is an order of a permit that is over."""
        pool = self._lease.section.rollout_pool
        try:
            grant = await (await self._lease.permits()).follow(pool, epoch, self._place)
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
        await (await self._lease.permits()).watch(grant, self._place)
        if self._grant is grant and not engine.load().asleep:
            self._actor.log.warning("permit_lost", pool=grant.pool, phase=ROLLOUT, epoch=grant.epoch)
            await self.carry_out(SleepEngine())
