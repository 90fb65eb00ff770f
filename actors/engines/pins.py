"""Evaluations have engines stay on one version of the weights: what a worker answers them with, loaded by the first of their messages."""

import msgspec

from actors.engines.hooks import EngineHook
from actors.messages.weights import HoldWeights, WeightsHeld
from planning.engine_info import EngineInfo
from runtime.actor import handler


class Pins(EngineHook):
    """Of one engine, whose WeightsPuller stays on a version for as long as is asked."""

    _is_told = False
    """The proxies take the engine for pinned."""

    @handler(concurrency=16)
    async def hold_weights(self, request: HoldWeights) -> WeightsHeld:
        """The proxies know before the asker does: they give this engine no request that needs newer weights, nor another one an exact one."""
        _, weights = self.worker.started()
        held = await weights.hold(request.version, request.epoch, request.for_s)
        await self._tell()
        return WeightsHeld(self.worker.name, held)

    def told(self, info: EngineInfo) -> EngineInfo:
        return msgspec.structs.replace(info, pinned=self.worker.started()[1].is_held)

    def swapped(self) -> None:
        if self._is_told:
            self.worker.spawn(self._tell(), name=f"{self.worker.name}.let_go")

    async def _tell(self) -> None:
        self._is_told = self.worker.started()[1].is_held
        await self.worker.tell_proxies()
