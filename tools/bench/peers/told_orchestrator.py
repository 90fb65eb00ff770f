"""The orchestrator of tools/bench/orchestrator.py: its arms are set while the job runs."""

import asyncio
from typing import ClassVar

from actors.scheduling.lengths import Lengths
from actors.scheduling.orchestrator import Orchestrator
from actors.scheduling.switches import Wanted
from bus.message import Ack, Request
from runtime.actor import handler


class SetArm(Request[Ack], frozen=True):
    """What is on from now on: planners, and engines to begin with."""

    idempotent: ClassVar[bool] = True
    planners: tuple[str, ...]
    engines: int = 0
    """That are awake, with all GPUs; 0: all."""
    fleet: int = 0
    """Engines that there are: nothing begins before the proxies have heard of each."""


class ToldOrchestrator(Orchestrator):
    """Begins each arm without what it saw of lengths before."""

    @handler
    async def set_arm(self, arm: SetArm) -> Ack:
        self._planners = frozenset()
        async with self._turn:
            surveyed, _ = await self._commands.look()
            while sum(each.modelled is not None for each in surveyed.engines) < arm.fleet:
                await asyncio.sleep(0.2)
                surveyed, _ = await self._commands.look()
            before = {each.name: Wanted(each.degree, each.asleep) for each in surveyed.engines}
            base = max(each.modelled.degree for each in surveyed.engines if each.modelled)
            awake = sorted(before)[: arm.engines or len(before)]
            degree = base * len(before) // len(awake)
            wanted = {name: Wanted(degree) if name in awake else Wanted(base, True) for name in before}
            await self._commands.shape(wanted, before)
            self._lengths, self._planned_for = Lengths(), 0
            self._moved_s.clear()
            self._changed_s.clear()
        self._planners = frozenset(arm.planners)
        return Ack()
