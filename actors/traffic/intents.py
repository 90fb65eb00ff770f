"""Tells the fabric which phase of the network training brings next."""

import asyncio
from collections import deque
from contextlib import suppress
from statistics import median
from typing import TYPE_CHECKING, Any, cast

from rubato.actors.messages.generation import GENERATION
from rubato.actors.messages.phases import Phase, PhaseIntent
from rubato.actors.plugins import SIZES_APART, load
from rubato.actors.training.hooks import StepHook, TrainedStep
from rubato.bus.errors import AskFailed

if TYPE_CHECKING:
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
        self._sizes: Any = None

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
            await self._tell(PhaseIntent("train_step", -1, 0.0, tuple(cast("Any", self.trainer.engine).exchanged)))

    async def before_publish(self, version: int) -> None:
        await self.intend("weight_sync", version)

    async def after_swap(self, version: int) -> None:
        """What has the network now is the rollout under it, of which the proxies tell too, unless the next step has begun before."""
        if self._began is None:
            await self.intend("rollout", version)

    async def intend(self, phase: Phase, step: int, in_s: float = 0.0) -> None:
        """Tell what comes, `in_s` from now, or what begins; the controller may be away."""
        await self._tell(PhaseIntent(phase, step, in_s, self._weights(step) if phase == "weight_sync" else ()))

    async def _tell(self, intent: PhaseIntent) -> None:
        with suppress(AskFailed, TimeoutError):
            async with asyncio.timeout(INTEND_S):
                await self.trainer.ref(FABRIC).tell(intent)

    def _weights(self, version: int) -> tuple[tuple[str, str, int], ...]:
        """What engines will pull of this version."""
        trainer, published, engines = self.trainer, self.trainer.out.published, self.trainer.peers(GENERATION)
        if published is None or not (trainer.peers(RANK) or published.delta_bytes or self._sizes):
            return tuple((trainer.name, engine, trainer.out.size_bytes) for engine in engines if published)
        self._sizes = self._sizes or load(SIZES_APART)(trainer)
        return self._sizes.of(version, published, engines)
