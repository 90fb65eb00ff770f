"""Looks for seeds that break an invariant, and makes what it finds small."""

from collections.abc import Sequence

import msgspec

from rubato.sim.simtest import mutations
from rubato.sim.simtest import setup as setups
from rubato.sim.simtest.faults import Fault
from rubato.sim.simtest.run import Bench, SeedOutcome, faults_of, run


class SeedFinding(msgspec.Struct):
    """One seed's verdict, as workers tell it. `failed` is empty where every invariant held."""

    seed: int
    steps: int
    fired: int
    hash: str = ""
    invariant: str = ""
    failed: str = ""
    faults: list[str] = []
    """What is left of the faults after all were dropped that the failure does not need."""
    replays: bool = True
    """A failing seed was run twice, with one and the same trace."""


def examine(bench: Bench, seed: int, kinds: Sequence[str], mutation: str = "", rounds: int = 1) -> SeedFinding:
    """Run a seed; one that fails is run again and minimised."""
    with mutations.applied(mutation):
        outcome = run(bench, seed, faults_of(seed, kinds, rounds))
        if outcome.violation is None:
            return SeedFinding(seed, outcome.steps, outcome.fired, outcome.hash)
        again = run(bench, seed, outcome.faults)
        least = minimised(bench, outcome)
    return SeedFinding(
        seed,
        outcome.steps,
        outcome.fired,
        outcome.hash,
        outcome.violation.invariant,
        str(outcome.violation),
        [str(fault) for fault in least],
        again.hash == outcome.hash,
    )


def minimised(bench: Bench, outcome: SeedOutcome) -> list[Fault]:
    """Drop one fault after another for as long as the same invariant breaks."""
    faults, wanted = outcome.faults, outcome.violation
    assert wanted is not None
    index = 0
    while index < len(faults):
        fewer = faults[:index] + faults[index + 1 :]
        found = run(bench, outcome.seed, fewer).violation
        if found is not None and found.invariant == wanted.invariant:
            faults = fewer
        else:
            index += 1
    return faults


def first_catch(bench: Bench, mutation: str, start: int, most: int, kinds: Sequence[str]) -> tuple[SeedOutcome | None, int]:
    """The first of `most` seeds that breaks with the safeguard removed and holds with it, and how many were looked at."""
    for number in range(most):
        seed = start + number
        if mutations.MUTATIONS[mutation].sessions and not setups.draw(seed).sessions:
            continue
        faults = faults_of(seed, kinds)
        with mutations.applied(mutation):
            outcome = run(bench, seed, faults)
        if outcome.violation is not None and run(bench, seed, faults).violation is None:
            return outcome, number + 1
    return None, most
