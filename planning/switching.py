"""Decides in which phases of a periodic job to change circuits: the choice with the shortest period, found exactly."""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple


class PhaseCost(NamedTuple):
    """A phase under each candidate topology."""

    window_s: float
    """How long it lasts when its traffic takes no time; 0 for one that only waits for its traffic."""
    busy_s: tuple[float, ...]
    """How long its traffic takes under each topology. It begins with the phase, which lasts max(window, busy) + idle."""
    idle_s: float = 0.0
    """How long it goes on when its traffic is through, however long that took."""

    def lasts_s(self, topology: int) -> float:
        return max(self.window_s, self.busy_s[topology]) + self.idle_s

    def quiet_s(self, topology: int) -> float:
        """Its end without traffic, in which a change of circuits can hide."""
        return max(0.0, self.window_s - self.busy_s[topology]) + self.idle_s


class Schedule(NamedTuple):
    """Which topology each phase has, round after round."""

    choices: tuple[int, ...]
    period_s: float
    """All phases, and the delay that is exposed."""
    exposed_s: float
    num_switches: int
    why: str


def schedule(phases: Sequence[PhaseCost], delay_s: float) -> Schedule:
    """The topology of each phase with the shortest period, then the fewest changes, then the lowest numbers.

    A change before a phase can hide in the end of the phase before it, when that one's traffic is through and its window
    is not: max(0, delay - quiet) of it is exposed. Dynamic programming over (phase, topology), once per topology of the
    first phase, which closes the period: O(phases · topologies³). Raises ValueError without phases or topologies.
    """
    num = len(phases[0].busy_s) if phases else 0
    if not num or any(len(phase.busy_s) != num for phase in phases):
        raise ValueError("every phase needs its time under each of the same topologies, one at least")
    (period_s, num_switches), choices = min(_best_from(first, phases, delay_s) for first in range(num))
    exposed_s = period_s - sum(p.lasts_s(k) for p, k in zip(phases, choices, strict=True))
    why = f"{num_switches} changes a period, {max(0.0, exposed_s):.3g} s of {period_s:.3g} s exposed"
    return Schedule(choices, period_s, max(0.0, exposed_s), num_switches, why)


_Partial = tuple[tuple[float, int], tuple[int, ...]]
"""Seconds and changes so far, and the choices that led there."""


def _best_from(first: int, phases: Sequence[PhaseCost], delay_s: float) -> _Partial:
    """The best period among those that begin with topology `first`."""
    num = len(phases[0].busy_s)
    reached: dict[int, _Partial] = {first: ((phases[0].lasts_s(first), 0), (first,))}
    for before, phase in pairwise(phases):
        reached = {k: min(_extend(partial, before, k, phase.lasts_s(k), delay_s) for partial in reached.values()) for k in range(num)}
    closed = (_extend(partial, phases[-1], first, 0.0, delay_s) for partial in reached.values())
    cost, choices = min(closed)
    return cost, choices[:-1]


def _extend(partial: _Partial, before: PhaseCost, topology: int, lasts_s: float, delay_s: float) -> _Partial:
    (seconds, changes), choices = partial
    if choices[-1] == topology:
        return (seconds + lasts_s, changes), (*choices, topology)
    exposed_s = max(0.0, delay_s - before.quiet_s(choices[-1]))
    return (seconds + lasts_s + exposed_s, changes + 1), (*choices, topology)
