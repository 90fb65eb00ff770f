"""The seam for what an engine's work is to last: as long as it takes, unless `engine.pace` models hardware."""

from collections.abc import Iterable, Mapping
from types import MappingProxyType

from actors.engines.engine import EngineError
from actors.engines.scheduler import Row


class RealTime:
    """Durations are in seconds, and 0 stands for the time that the work takes anyway. Derive another timing from it."""

    @property
    def degree(self) -> int:
        """GPUs that share each layer."""
        return 1

    @property
    def gauges(self) -> Mapping[str, float]:
        """Metrics of its own."""
        return MappingProxyType({})

    def step_s(self, rows: Iterable[Row]) -> float:
        """One step."""
        return 0.0

    def swap_s(self) -> float:
        """A weight swap."""
        return 0.0

    def kv_move_s(self, tokens: int) -> float:
        """The way of the KV of `tokens` to another engine."""
        return 0.0

    def sleep_s(self, tokens: int) -> float:
        """The way of weights and the KV of `tokens` to host memory, or back."""
        return 0.0

    def reconfigure(self, degree: int, tokens: int) -> float:
        """Last like `degree` GPUs from now on; returns what the change takes an engine that holds the KV of `tokens`.

        Raises EngineError, and changes nothing, for a degree that can't be.
        """
        if degree != 1:
            raise EngineError(f"degree={degree} needs engine.pace: without it this engine computes on one device")
        return 0.0

    def due(self, duration_s: float, began: float, now: float) -> float:
        """When something is over that began at `began`, is computed by `now`, and is to last `duration_s`."""
        return now

    def idle(self) -> None:
        """Nothing runs: what comes next begins when it does."""
