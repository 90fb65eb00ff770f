"""What an engine's steps cost: a linear model of their seconds, fitted to those that were observed.

A step computes tokens of prompts and decodes one token each for a batch of requests that hold some context together: the terms of
planning/roofline.py, whose times are linear in these as long as one roof bounds them.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

NUM: Final = 4
"""Terms: prompt tokens, whether the step decodes, its batch, the tokens that the batch holds."""

PAIRS: Final = tuple((i, j) for i in range(NUM) for j in range(i, NUM))

SIZE: Final = NUM + 2 + len(PAIRS)
"""Of the sums: steps with prompts, steps that decode, the products of the terms, the terms by the seconds."""

SEEN: Final = 8
"""Steps of either kind from which on a class counts as measured."""

SWEEPS: Final = 400


class StepCost(NamedTuple):
    """Seconds of one step."""

    prefill_s: float
    """Each token of a prompt that it computes."""
    step_s: float
    """Where it decodes, whatever the batch: the weights are read."""
    token_s: float
    """Each request that it decodes for."""
    context_s: float
    """Each token that these hold."""

    def seconds(self, prefill: float, batch: float, context: float) -> float:
        """Of a step that computes `prefill` tokens of prompts and decodes for `batch` requests that hold `context` tokens."""
        decodes = self.step_s if batch else 0.0
        return self.prefill_s * prefill + decodes + self.token_s * batch + self.context_s * context


class StepSums:
    """Sums over steps, from which `fit` finds their cost. They may be added up over engines, and subtracted."""

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


def fit(sums: StepSums) -> StepCost | None:
    """The non-negative linear model with the least squared relative error; None where too few steps of either kind were seen.

    By coordinate descent on the normal equations, which has four unknowns to turn.
    """
    values = sums.values
    if min(sums.with_prompts, sums.decoding) < SEEN:
        return None
    products = [[0.0] * NUM for _ in range(NUM)]
    for at, (i, j) in enumerate(PAIRS, 2):
        products[i][j] = products[j][i] = values[at]
    aims, found = values[-NUM:], [0.0] * NUM
    for _ in range(SWEEPS):
        for i, row in enumerate(products):
            if row[i] > 0.0:
                rest = sum(row[j] * found[j] for j in range(NUM) if j != i)
                found[i] = max(0.0, (aims[i] - rest) / row[i])
    return StepCost(*found)
