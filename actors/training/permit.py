"""The trainer's turns on a pool that jobs share: between them model and optimiser are in host memory."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager

from actors.cluster import TRAINING, ClusterSection, permits_of
from actors.permits import Grant, Permits
from actors.training.engine import TrainEngine
from runtime.actor import Actor


class TurnGivenUp(Exception):
    """The trainer leaves, and does not wait for its turn: the step is trained when the run goes on."""


class TrainingPermit:
    """Of one trainer. A job that has its trainer to itself has every turn at once."""

    def __init__(self, actor: Actor, section: ClusterSection) -> None:
        self._actor, self._section = actor, section
        self._permits: asyncio.Future[Permits]

    async def begin(self, engine: TrainEngine) -> None:
        """`engine` has loaded its model, and sleeps until its first turn."""
        if self._section.dir:
            await self._actor.offload(engine.sleep)
            self._permits = asyncio.get_running_loop().create_future()
            self._actor.spawn(self._reach(), name=f"{self._actor.name}.cluster")

    async def _reach(self) -> None:
        async with permits_of(self._section) as permits:
            self._permits.set_result(permits)
            await asyncio.Event().wait()

    @asynccontextmanager
    async def turn(self, engine: TrainEngine, leaving: asyncio.Event) -> AsyncGenerator[float]:
        """Have the pool, with `engine` awake, while the block runs; gives the seconds that were waited for it.

        Raises TurnGivenUp where `leaving` is set before the turn comes.
        """
        if not self._section.dir:
            yield 0.0
            return
        asked = asyncio.get_running_loop().time()
        async with AsyncExitStack() as held:
            grant = await self._granted(held, leaving)
            self._actor.log.info("permit_held", pool=grant.pool, phase=TRAINING, epoch=grant.epoch)
            with self._actor.trace.span(TRAINING, "permit", pool=grant.pool, epoch=grant.epoch):
                began = asyncio.get_running_loop().time()
                await self._actor.offload(engine.wake)
                now = asyncio.get_running_loop().time()
                self._actor.log.info("woke", phase=TRAINING, epoch=grant.epoch, seconds=now - began)
                yield now - asked
                await self._actor.offload(engine.sleep)
            if grant.lost.is_set():
                self._actor.notice(
                    f"the permit of {grant.pool} was lost during a training step: it was not renewed in time"
                )

    async def _granted(self, held: AsyncExitStack, leaving: asyncio.Event) -> Grant:
        pool = self._section.training_pool
        with self._actor.waits.on("permit", stage=TRAINING, detail=f"the pool {pool}", blocks_actor=True):
            async with self.waiting(leaving):
                permits = await self._permits
                return await held.enter_async_context(permits.hold(pool, TRAINING, self._section.job))

    @asynccontextmanager
    async def waiting(self, leaving: asyncio.Event) -> AsyncGenerator[None]:
        """Around what waits for a turn, the trainer's or the engines'. Raises TurnGivenUp where `leaving` is set before the block ends."""
        if not self._section.dir:
            yield
            return
        scope = asyncio.timeout(None)
        watching = self._actor.spawn(_end(scope, leaving), name=f"{self._actor.name}.leaving")
        try:
            async with scope:
                yield
        except TimeoutError:
            raise TurnGivenUp(f"{self._section.job} waits for no turn any more: it is being saved") from None
        finally:
            watching.cancel()


async def _end(scope: asyncio.Timeout, leaving: asyncio.Event) -> None:
    await leaving.wait()
    scope.reschedule(asyncio.get_running_loop().time())
