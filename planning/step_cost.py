"""What an engine's steps cost: a linear model of their seconds, fitted to those that were observed.

A step computes tokens of prompts and decodes one token each for a batch of requests that hold some context together: the terms of
planning/roofline.py, whose times are linear in these as long as one roof bounds them.
"""

from typing import Final, NamedTuple

from rubato.planning.step_sums import NUM, PAIRS, StepSums

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
