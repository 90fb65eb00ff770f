"""The trainer's turns on a pool that jobs share: between them model and optimiser are in host memory.

A trainer that lost its permit computes nothing more: it looks by its own clock before each part of a step, and where it is no longer sure
it sleeps, asks anew, and goes on from there.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, TypeVar

from actors.cluster import TRAINING
from actors.cluster.lease import PoolLease
from actors.permits import Grant
from actors.training.engine import advance
from actors.training.turns import StepGivenUp, Turn, TurnGivenUp, Turns

ResultT = TypeVar("ResultT")


class SharedTurns(Turns):
    """Of one trainer."""

    _lease: PoolLease

    async def begin(self) -> None:
        """It sleeps until its first turn."""
        trainer = self.trainer
        await trainer.offload(trainer.engine.sleep)
        self._lease = PoolLease(trainer, trainer.config.cluster)
        self._lease.begin()

    @asynccontextmanager
    async def turn(self) -> AsyncGenerator["SharedTurn"]:
        """Have the pool, with the engine awake, while the block runs."""
        async with AsyncExitStack() as held:
            turn = SharedTurn(self, held)
            await turn.have()
            yield turn
            await self.trainer.offload(self.trainer.engine.sleep)

    async def granted(self, held: AsyncExitStack) -> Grant:
        """The permit, which is held until `held` ends."""
        async with self.waiting():
            return await held.enter_async_context(self._lease(TRAINING))

    @asynccontextmanager
    async def waiting(self) -> AsyncGenerator[None]:
        trainer, scope = self.trainer, asyncio.timeout(None)
        watching = trainer.spawn(_end(scope, trainer.leaving), name=f"{trainer.name}.leaving")
        try:
            async with scope:
                yield
        except TimeoutError:
            job = trainer.config.cluster.job
            raise TurnGivenUp(f"{job} waits for no turn any more: it is being saved") from None
        finally:
            watching.cancel()


class SharedTurn(Turn):
    """It goes on under another grant where its own was lost."""

    def __init__(self, turns: SharedTurns, held: AsyncExitStack) -> None:
        super().__init__(turns.trainer)
        self._turns, self._held = turns, held
        self._grant: Grant | None = None

    @property
    def figures(self) -> dict[str, float]:
        return {"time/wait_for_permit": self.waited_s}

    async def compute(self, call: Callable[..., ResultT], *args: Any) -> ResultT:
        await self.have()
        return await super().compute(call, *args)

    async def run(self, parts: Generator[None, None, ResultT]) -> ResultT:
        """One by one, each of which begins under the permit."""

        def part() -> ResultT | None:
            return advance(parts)

        result = await self.compute(part)
        while result is None:
            try:
                result = await self.compute(part)
            except TurnGivenUp as error:
                raise StepGivenUp(f"{error}, in the middle of a step") from None
        return result

    async def have(self) -> None:
        """Return once the pool is held for certain, and the engine is awake. Raises TurnGivenUp."""
        asked = asyncio.get_running_loop().time()
        while self._grant is None or not self._grant.is_held:
            if self._grant is not None:
                await self._lost(self._grant)
            self._grant = await self._begin()
        self.waited_s += asyncio.get_running_loop().time() - asked

    async def _begin(self) -> Grant:
        """Wait in line, and wake the engine where nothing was lost since."""
        grant, trainer = await self._turns.granted(self._held), self.trainer
        if grant.is_held:
            began = asyncio.get_running_loop().time()
            await trainer.offload(trainer.engine.wake)
            seconds = asyncio.get_running_loop().time() - began
            trainer.log.info("woke", phase=TRAINING, epoch=grant.epoch, seconds=seconds)
        return grant

    async def _lost(self, grant: Grant) -> None:
        """The device is another's: leave it."""
        await self.trainer.offload(self.trainer.engine.sleep)
        await self._held.aclose()
        self.trainer.notice(
            f"the permit of {grant.pool} was lost during a training step: it was not renewed in time. The step goes on with the next one"
        )


async def _end(scope: asyncio.Timeout, leaving: asyncio.Event) -> None:
    await leaving.wait()
    scope.reschedule(asyncio.get_running_loop().time())
