"""Tells the fabric which phase of the network training brings next."""

import asyncio
from collections import deque
from contextlib import suppress
from statistics import median
from typing import TYPE_CHECKING, cast

from rubato.actors.messages.fabric import Phase, PhaseIntent
from rubato.actors.messages.generation import GENERATION
from rubato.actors.training.hooks import StepHook, TrainedStep
from rubato.bus.errors import AskFailed
from rubato.planning.demand import Demand
from rubato.runtime.blobs.patches import FULL_EVERY

if TYPE_CHECKING:
    from rubato.actors.ranks.head import RankedEngine
    from rubato.actors.training.trainer import Trainer

INTEND_S = 1.0
"""The fabric hears of phases ahead of time; a controller that takes longer hears of the next one."""

REMEMBERED = 5
"""Steps whose usual time says when the next weights are due: a median of five shrugs off two outliers."""

FABRIC, RANK = "fabric_controller", "trainer_rank"


class FabricIntents(StepHook):
    """Training, the weights that follow it, and the rollouts once all engines have them."""

    def __init__(self, trainer: "Trainer") -> None:
        super().__init__(trainer)
        self._took_s: deque[float] = deque(maxlen=REMEMBERED)
        self._began: float | None = None
        self._delta_bytes = 0
        """Of the last version that did not have to travel whole; 0 where it did all the same."""

    async def before_step(self, step: int) -> None:
        self._began = asyncio.get_running_loop().time()
        await self.intend("train_step", step)
        if self._took_s:
            await self.intend("weight_sync", step, in_s=median(self._took_s))

    async def after_step(self, trained: TrainedStep) -> None:
        if self._began is not None:
            self._took_s.append(asyncio.get_running_loop().time() - self._began)
        self._began = None
        if self.trainer.peers(RANK):
            told = cast("RankedEngine", self.trainer.engine).exchanged
            await self._tell(PhaseIntent("train_step", -1, 0.0, tuple(told)))

    async def before_publish(self, version: int) -> None:
        await self.intend("weight_sync", version)

    async def after_swap(self, version: int) -> None:
        """What has the network now is the next rollout, unless the next step has begun before."""
        if self._began is None:
            await self.intend("rollout", version + 1)

    async def intend(self, phase: Phase, step: int, in_s: float = 0.0) -> None:
        """Tell what comes, `in_s` from now, or what begins; the controller may be away."""
        await self._tell(PhaseIntent(phase, step, in_s, self._weights(step) if phase == "weight_sync" else ()))

    def _weights(self, version: int) -> tuple[Demand, ...]:
        """What engines will pull of this version: on other hosts what changed since the one before, where that is how it travels.

        How much that is, the last version that travelled so says.
        """
        trainer, published = self.trainer, self.trainer.out.published
        if published is None:
            return ()
        if published.version % FULL_EVERY:
            self._delta_bytes = published.delta_bytes
        whole = published.size_bytes
        travels = self._delta_bytes if self._delta_bytes and version % FULL_EVERY else whole
        return tuple(
            (source, engine, round(share * (whole if self._node(engine) == node else travels)))
            for source, node, share in self._sources()
            for engine in trainer.peers(GENERATION)
        )

    def _sources(self) -> list[tuple[str, str, float]]:
        """Who has the weights, on which host, and which share of them: the trainer, or the first of its ranks on each host."""
        trainer = self.trainer
        shares = cast("RankedEngine", trainer.engine).shares if trainer.peers(RANK) else ()
        num_bytes = sum(share.num_bytes for share in shares)
        apart = any(share.node != trainer.node for share in shares)
        return [(each.first, each.node, each.num_bytes / num_bytes) for each in shares] if apart else [(trainer.name, trainer.node, 1.0)]

    def _node(self, actor: str) -> str:
        record = self.trainer.directory.find(actor)
        return record.node if record is not None else ""

    async def _tell(self, intent: PhaseIntent) -> None:
        with suppress(AskFailed, TimeoutError):
            async with asyncio.timeout(INTEND_S):
                await self.trainer.ref(FABRIC).tell(intent)
