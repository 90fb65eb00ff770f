"""Engines and an orchestrator of real processes, one of which is killed when an engine is asked for a stage of a switch or a move."""

import contextlib
import os
import signal
from collections.abc import Sequence

from rubato.actors import plugins
from rubato.actors.engines.worker import EngineWorker
from rubato.actors.messages.engines import Obeyed, Reconfigure, SleepEngine, WakeEngine
from rubato.actors.messages.moves import MovePrepared, NotMoved, PrepareMove, TakeMove
from rubato.actors.messages.orchestration import Surveyed
from rubato.actors.moves.departures import EngineMoves
from rubato.actors.moves.orders import Orders
from rubato.actors.orchestrator.fleet import GpuGroup
from rubato.actors.orchestrator.lengths import Underway
from rubato.actors.orchestrator.orchestrator import Orchestrator
from rubato.actors.orchestrator.switches import Reshape, Shape
from rubato.bus.message import Ack, Request
from rubato.runtime.actor import handler

ARMED, DONE = "armed", "done"
"""Files of the run's folder; the first says `STAGE VICTIM`, and becomes the second as the victim dies."""


class Change(Request[Ack], frozen=True):
    """Make engines what is said, and move requests, one by one."""

    degrees: dict[str, int] = {}
    """Of each engine that changes; 0: asleep."""
    moves: dict[str, str] = {}


class ToldOrchestrator(Orchestrator):
    """What it changes is told; that it carries it out, and puts servers right, is the shipped one's."""

    async def _begin_step(self, found: Sequence[GpuGroup], surveyed: Surveyed, running: Sequence[Underway]) -> bool:
        return False

    async def _switch(self, found: Sequence[GpuGroup], surveyed: Surveyed, running: Sequence[Underway]) -> bool:
        return False

    @handler
    async def change(self, change: Change) -> Ack:
        async with self._turn:
            surveyed, whose = await self._commands.look()
            if change.degrees:
                wanted = {name: Shape(degree or 1, not degree) for name, degree in change.degrees.items()}
                await self._commands.reshape(Reshape("as told", wanted, change.moves, ""), surveyed.engines)
            else:
                await self._commands.move(change.moves.items(), whose)
        return Ack()


class FaultyWorker(EngineWorker):
    """Kills the armed victim, itself as well as any other, when the armed stage is asked of it, before or after it was done."""

    def reached(self, stage: str) -> None:
        armed = self.run.folder / ARMED
        wanted, victim = armed.read_text().split() if armed.exists() else ("", "")
        if wanted != stage:
            return
        record = self.directory.find(victim)
        pid = os.getpid() if victim == self.name else record.pid if record else 0
        assert pid, f"{victim} is not known to {self.name}"
        with contextlib.suppress(FileNotFoundError):  # another engine was there first
            armed.rename(armed.with_name(DONE))
            os.kill(pid, signal.SIGKILL)

    def make(self, path):
        made = {plugins.ENGINE_MOVES: FaultyMoves, plugins.ORDERS: FaultyOrders}
        return made[path](self) if path in made else super().make(path)


class FaultyMoves(EngineMoves):
    @handler(concurrency=64, outlives_asker=True)
    async def prepare_move(self, request: PrepareMove) -> MovePrepared | NotMoved:
        self.worker.reached("PrepareMove")
        reply = await super().prepare_move(request)
        self.worker.reached("MovePrepared")
        return reply

    @handler(concurrency=64)
    async def take_move(self, request: TakeMove) -> Ack | NotMoved:
        self.worker.reached("TakeMove")
        reply = await super().take_move(request)
        self.worker.reached("MoveTaken")
        return reply


class FaultyOrders(Orders):
    @handler(concurrency=4, outlives_asker=True)
    async def sleep_engine(self, order: SleepEngine) -> Obeyed:
        self.worker.reached("SleepEngine")
        reply = await super().sleep_engine(order)
        self.worker.reached("Asleep")
        return reply

    @handler(concurrency=4, outlives_asker=True)
    async def wake_engine(self, order: WakeEngine) -> Obeyed:
        self.worker.reached("WakeEngine")
        reply = await super().wake_engine(order)
        self.worker.reached("Awake")
        return reply

    @handler(concurrency=4, outlives_asker=True)
    async def reconfigure(self, order: Reconfigure) -> Obeyed:
        self.worker.reached("Reconfigure")
        reply = await super().reconfigure(order)
        self.worker.reached("Reconfigured")
        return reply
