"""Sums over an engine's steps, of which their cost is fitted (planning/step_cost.py): they may be added up over engines, and subtracted."""

from collections.abc import Sequence
from typing import Final

NUM: Final = 4
"""Terms: prompt tokens, whether the step decodes, its batch, the tokens that the batch holds."""

PAIRS: Final = tuple((i, j) for i in range(NUM) for j in range(i, NUM))

SIZE: Final = NUM + 2 + len(PAIRS)
"""Of the sums: steps with prompts, steps that decode, the products of the terms, the terms by the seconds."""


class StepSums:
    """The sums of some steps."""

    __slots__ = ("values",)

    def __init__(self, values: Sequence[float] = ()) -> None:
        self.values: list[float] = list(values) or [0.0] * SIZE

    @property
    def with_prompts(self) -> float:
        """Steps that computed tokens of prompts."""
        return self.values[0]

    @property
    def decoding(self) -> float:
        """Steps that decoded."""
        return self.values[1]

    def add(self, prefill: int, batch: int, context: int, seconds: float, times: int = 1) -> None:
        """`times` steps that computed `prefill` tokens of prompts, decoded for `batch` requests holding `context`, and lasted `seconds` each.

        Each weighs by the square of its inverse duration, so that the fit is as good, relatively, for short steps as for long ones.
        """
        if seconds <= 0.0:
            return
        values, share = self.values, times / seconds
        terms = (prefill / seconds, (1 if batch else 0) / seconds, batch / seconds, context / seconds)
        values[0] += times * (prefill > 0)
        values[1] += times * (batch > 0)
        at = 2
        for i, j in PAIRS:
            values[at] += times * terms[i] * terms[j]
            at += 1
        values[at] += share * prefill
        values[at + 1] += share if batch else 0.0
        values[at + 2] += share * batch
        values[at + 3] += share * context

    def include(self, more: Sequence[float], since: Sequence[float] = ()) -> None:
        """Add another's `values`; of these what came after it had `since`."""
        for at, value in enumerate(more):
            self.values[at] += value - (since[at] if since else 0.0)
