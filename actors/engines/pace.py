"""Time that is modelled: how long an engine's steps last on the hardware of `engine.pace`, and how many outlasted that."""

from collections.abc import Iterable

from actors.engines.scheduler import Row
from actors.engines.section import PaceSection
from planning.roofline import Roofline

MOST_OUTLASTED = 0.02
"""Share of an engine's steps above which its times no longer are the hardware's: figures from it count for nothing."""


class Pace:
    """One device that does one thing after another. It computes durations and never waits: that is the engine's to do."""

    def __init__(self, section: PaceSection) -> None:
        self._roofline = Roofline(section.spec())
        self._scale = section.scale
        self._free_at: float | None = None
        self.num = 0
        """Steps and swaps so far."""
        self.outlasted = 0
        """Those that took longer than their pace."""

    def step_s(self, rows: Iterable[Row]) -> float:
        """Seconds of one step: its prefills one after another, then its decodes as one batch, which is how RLSim counts them."""
        prefill_s, batch, context = 0.0, 0, 0
        for _, start, end in rows:
            if end - start == 1:
                batch += 1
                context += start
            else:
                prefill_s += self._roofline.prefill_s(end - start, start)
        return self._scale * (prefill_s + (self._roofline.step_s(batch, context) if batch else 0.0))

    def swap_s(self) -> float:
        """Seconds of a weight swap."""
        return self._scale * self._roofline.swap_s()

    def kv_move_s(self, tokens: int) -> float:
        """Seconds that the KV of `tokens` takes to another engine of this shape."""
        return self._scale * self._roofline.kv_move_s(tokens)

    def due(self, duration_s: float, began: float, now: float) -> float:
        """When something is over that began at `began`, is computed by `now`, and is to last `duration_s`; it is counted.

        What follows without a pause begins when the one before was due: a late wake-up, and what the engine does between two steps,
        is part of the later one and adds up to nothing. What took longer is over now.
        """
        due = (began if self._free_at is None else self._free_at) + duration_s
        self.num += 1
        self.outlasted += now > due
        self._free_at = max(due, now)
        return self._free_at

    def idle(self) -> None:
        """Nothing runs: what comes next begins when it does."""
        self._free_at = None
