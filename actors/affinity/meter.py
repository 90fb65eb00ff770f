"""Sums up what an engine's steps cost, from when a proxy first asks for it."""

from typing import TYPE_CHECKING, Protocol, runtime_checkable

from rubato.actors.engines.engine import EngineHook, StepSeen
from rubato.actors.messages.affinity import Measure, StepsMeasured
from rubato.planning.step_sums import StepSums
from rubato.runtime.actor import handler

if TYPE_CHECKING:
    from rubato.actors.engines.worker import EngineWorker


@runtime_checkable
class SeesSteps(Protocol):
    """An engine that knows its steps, which one of another process may not."""

    def observe(self, step: StepSeen) -> None:
        """Call `step` after each step from now on."""
        ...


class StepMeter(EngineHook):
    """The sums of one engine."""

    def __init__(self, worker: "EngineWorker") -> None:
        super().__init__(worker)
        self._sums: StepSums | None = None

    @handler
    async def measure(self, request: Measure) -> StepsMeasured:
        engine, _ = self.worker.started()
        if self._sums is None and isinstance(engine, SeesSteps):
            self._sums = StepSums()
            engine.observe(self._sums.add)
        return StepsMeasured(self.worker.name, () if self._sums is None else tuple(self._sums.values))
