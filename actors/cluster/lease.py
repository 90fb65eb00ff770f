"""The seam for the right to compute: an actor has it always, unless its job shares hardware with other jobs and takes turns with them."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import Protocol

from actors.cluster import ROLLOUT, TRAINING, permits_of
from actors.config import ClusterSection
from actors.permits import Grant, Permits
from runtime.actor import Actor


class Held(Protocol):
    """The right, while a block that has it runs. It may be lost meanwhile, which ends nothing by itself: whoever computes looks."""

    lost: asyncio.Event
    """Set once it is no longer held."""

    @property
    def is_held(self) -> bool:
        """For certain, by this process's own clock."""
        ...


class ComputeLease(Protocol):
    """`async with lease(phase) as held:` waits for the right to compute in that phase of the job, and has it while the block runs.

    An actor that is cancelled leaves the line. Where the block ends with an error or not, the right goes to the next in line.
    """

    def __call__(self, phase: str) -> AbstractAsyncContextManager[Held]: ...


class Always:
    """Held, and never lost."""

    is_held = True

    def __init__(self) -> None:
        self.lost = asyncio.Event()


@asynccontextmanager
async def always_held(phase: str) -> AsyncGenerator[Always]:
    """The lease of a job that has its hardware to itself."""
    yield Always()


class PoolLease(ComputeLease):
    """Turns on the pools of a cluster. Its permits are reached by `run`, a task of the actor; until then everybody waits."""

    def __init__(self, actor: Actor, section: ClusterSection) -> None:
        self._actor, self.section = actor, section
        self._permits: asyncio.Future[Permits] | None = None

    def begin(self) -> None:
        """Reach the cluster, for as long as the actor runs."""
        self._permits = asyncio.get_running_loop().create_future()
        self._actor.spawn(self._reach(self._permits), name=f"{self._actor.name}.cluster")

    async def _reach(self, reached: "asyncio.Future[Permits]") -> None:
        async with permits_of(self.section) as permits:
            reached.set_result(permits)
            await asyncio.Event().wait()

    async def permits(self) -> Permits:
        """Those of the cluster, once it is reached."""
        assert self._permits is not None, "begin comes first"
        return await asyncio.shield(self._permits)

    def _stand(self, phase: str) -> tuple[str, str]:
        """The pool of a phase, and who stands in its line: the job, or each actor of it where the phase has a line of its own."""
        section = self.section
        pools = {ROLLOUT: section.rollout_pool, TRAINING: section.training_pool}
        return (pools[phase], section.job) if phase in pools else (phase, f"{section.job}.{self._actor.name}")

    @asynccontextmanager
    async def __call__(self, phase: str) -> AsyncGenerator[Grant]:
        actor, (pool, member) = self._actor, self._stand(phase)
        async with AsyncExitStack() as held:
            what = f"the pool {pool}" if pool != phase else "the link for weights"
            with actor.waits.on("permit", stage=phase, detail=what, blocks_actor=phase == TRAINING) as wait:
                permits = await self.permits()
                wait.described_by(lambda: permits.why(pool))
                grant = await held.enter_async_context(permits.hold(pool, phase, member))
            if pool != phase:
                actor.log.info("permit_held", pool=pool, phase=phase, epoch=grant.epoch)
                held.enter_context(actor.trace.span(phase, "permit", pool=pool, epoch=grant.epoch))
            yield grant
