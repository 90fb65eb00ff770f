"""The trainer's turns on a pool that jobs share: between them model and optimiser are in host memory.

A trainer that lost its permit computes nothing more: it looks by its own clock before each part of a step, and where it is no longer sure
it sleeps, asks anew, and goes on from there.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, TypeVar

from actors.cluster import TRAINING, ClusterSection, permits_of
from actors.permits import Grant, Permits
from actors.training.engine import TrainEngine, advance
from runtime.actor import Actor

ResultT = TypeVar("ResultT")


class TurnGivenUp(Exception):
    """The trainer leaves, and does not wait for its turn: the step is trained when the run goes on."""


class StepGivenUp(TurnGivenUp):
    """The same within a step: model and optimiser are those of no step, and must not be saved."""


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
    async def turn(self, engine: TrainEngine, leaving: asyncio.Event) -> AsyncGenerator["Turn"]:
        """Have the pool, with `engine` awake, while the block runs; what it computes goes through the turn.

        Raises TurnGivenUp where `leaving` is set before the turn comes.
        """
        async with AsyncExitStack() as held:
            turn = Turn(self, self._actor, engine, leaving, held, is_shared=bool(self._section.dir))
            await turn.have()
            yield turn
            if turn.is_shared:
                await self._actor.offload(engine.sleep)

    async def granted(self, held: AsyncExitStack, leaving: asyncio.Event) -> Grant:
        """The permit, which is held until `held` ends."""
        pool = self._section.training_pool
        with self._actor.waits.on("permit", stage=TRAINING, detail=f"the pool {pool}", blocks_actor=True) as wait:
            async with self.waiting(leaving):
                permits = await self._permits
                wait.described_by(lambda: permits.why(pool))
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


class Turn:
    """One turn. It goes on under another grant where its own was lost."""

    def __init__(
        self,
        permit: TrainingPermit,
        actor: Actor,
        engine: TrainEngine,
        leaving: asyncio.Event,
        held: AsyncExitStack,
        *,
        is_shared: bool,
    ) -> None:
        self._permit, self._actor, self._engine = permit, actor, engine
        self._leaving, self._held = leaving, held
        self._grant: Grant | None = None
        self.is_shared = is_shared
        self.waited_s = 0.0
        """For the permit, and for the engine to wake."""

    async def compute(self, call: Callable[..., ResultT], *args: Any) -> ResultT:
        """Offload `call`, which begins under the permit. Raises TurnGivenUp."""
        await self.have()
        return await self._actor.offload(call, *args)

    async def run(self, parts: Generator[None, None, ResultT]) -> ResultT:
        """Offload `parts` one by one, each of which begins under the permit.

        Raises TurnGivenUp before the first of them, StepGivenUp between two.
        """

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
        if not self.is_shared:
            return
        asked = asyncio.get_running_loop().time()
        while self._grant is None or not self._grant.is_held:
            if self._grant is not None:
                await self._lost(self._grant)
            self._grant = await self._begin()
        self.waited_s += asyncio.get_running_loop().time() - asked

    async def _begin(self) -> Grant:
        """Wait in line, and wake the engine where nothing was lost since."""
        grant = await self._permit.granted(self._held, self._leaving)
        actor = self._actor
        actor.log.info("permit_held", pool=grant.pool, phase=TRAINING, epoch=grant.epoch)
        self._held.enter_context(actor.trace.span(TRAINING, "permit", pool=grant.pool, epoch=grant.epoch))
        if grant.is_held:
            began = asyncio.get_running_loop().time()
            await actor.offload(self._engine.wake)
            seconds = asyncio.get_running_loop().time() - began
            actor.log.info("woke", phase=TRAINING, epoch=grant.epoch, seconds=seconds)
        return grant

    async def _lost(self, grant: Grant) -> None:
        """The device is another's: leave it."""
        await self._actor.offload(self._engine.sleep)
        await self._held.aclose()
        self._actor.notice(
            f"the permit of {grant.pool} was lost during a training step: it was not renewed in time. The step goes on with the next one"
        )


async def _end(scope: asyncio.Timeout, leaving: asyncio.Event) -> None:
    await leaving.wait()
    scope.reschedule(asyncio.get_running_loop().time())
