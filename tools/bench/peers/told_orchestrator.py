"""An orchestrator whose arms are set while the job runs (tools/bench/orchestrator.py), and that switches when it is told to."""

import asyncio
from typing import ClassVar

from rubato.actors.messages.orchestration import Surveyed
from rubato.actors.orchestrator.fleet import servers
from rubato.actors.orchestrator.lengths import Lengths
from rubato.actors.orchestrator.orchestrator import Orchestrator
from rubato.actors.orchestrator.switches import Shape, as_step
from rubato.bus.message import Ack, Request
from rubato.planning.parallelism import StepPlan
from rubato.runtime.actor import handler


class SetArm(Request[Ack], frozen=True):
    """What is on from now on: planners, and engines to begin with."""

    idempotent: ClassVar[bool] = True
    planners: tuple[str, ...]
    engines: int = 0
    """That are awake, with all GPUs; 0: all."""
    fleet: int = 0
    """Engines that there are: nothing begins before the proxies have heard of each."""


class Become(Request[Ack], frozen=True):
    """Let the engines of the one server have these degrees now, as if they were planned for the step that runs."""

    idempotent: ClassVar[bool] = True
    degrees: tuple[int, ...]
    fleet: int
    """Engines that there are: nothing begins before the proxies have heard of each."""


class ToldOrchestrator(Orchestrator):
    """Begins each arm without what it saw of lengths before."""

    @handler
    async def set_arm(self, arm: SetArm) -> Ack:
        self._planners = frozenset()
        async with self._turn:
            surveyed = await self._all_here(arm.fleet)
            before = {each.name: Shape(each.degree, each.asleep) for each in surveyed.engines}
            base = max(each.profile.degree for each in surveyed.engines if each.profile)
            awake = sorted(before)[: arm.engines or len(before)]
            degree = base * len(before) // len(awake)
            wanted = {name: Shape(degree) if name in awake else Shape(base, True) for name in before}
            await self._commands.shape(wanted, before)
            self._lengths, self._planned_for = Lengths(), 0
            self._moved_s.clear()
            self._changed_s.clear()
        self._planners = frozenset(arm.planners)
        return Ack()

    @handler(outlives_asker=True)
    async def become(self, told: Become) -> Ack:
        async with self._turn:
            surveyed = await self._all_here(told.fleet)
            (server,) = servers(surveyed.engines, self._place)
            names = [each.request_id for each in surveyed.requests]
            dealt = tuple(tuple(names[place :: len(told.degrees)]) for place in range(len(told.degrees)))
            plan = StepPlan(told.degrees, dealt, 0.0, True, f"degrees {told.degrees} were asked for")
            await self._carry_out({server: as_step(server, plan, names)}, surveyed)
        return Ack()

    async def _all_here(self, fleet: int) -> Surveyed:
        surveyed, _ = await self._commands.look()
        while sum(len(server.engines) for server in servers(surveyed.engines, self._place)) < fleet:
            await asyncio.sleep(0.2)
            surveyed, _ = await self._commands.look()
        return surveyed
