"""Decides which optical circuits a phase gets, and whether changing to them is worth the dark time.

Endpoint i of the fabric owns the switch's ports i·u … i·u+u-1, each with both directions of fibre. A link between two
endpoints takes one port of each and is two circuits, one per direction; links of a phase always connect all endpoints.
"""

from collections import Counter
from collections.abc import Sequence
from enum import StrEnum
from typing import Final, NamedTuple

from rubato.planning.demand import Links, Pair

PAYS_OFF: Final = 10.0
"""A change in a phase that already runs is made only when the phase lasts this many times the delay: below, the electrical
path has carried it before the circuits have paid for their dark time."""


class Verdict(StrEnum):
    """What becomes of the circuits in place; the value is the sentence that says why."""

    FITS = "the circuits in place already fit"
    AHEAD = "changes before the phase begins"
    LATE = "changes in the running phase, which lasts long enough to gain"
    KEPT = "the window is shorter than the delay: the old circuits stay"


class Cross(NamedTuple):
    """A circuit from an input port to an output port of the switch."""

    ingress: int
    egress: int


class FabricSnapshot(NamedTuple):
    """The fabric and the phase to come, as the planner sees them."""

    ports_per_endpoint: int
    links: Links
    """Those of the phase."""
    current: tuple[Cross, ...]
    """What the switch holds."""
    starts_in_s: float
    """Time until the phase begins; 0 or less when it runs."""
    lasts_s: float | None
    """How long the phase runs once begun; None while unknown, which counts as long."""
    reconfiguration_s: float
    """Time from asking for new circuits to using them."""
    dead: frozenset[int] = frozenset()
    """Ports of the switch that no circuit may use."""


class CircuitPlan(NamedTuple):
    """Circuits that the phase should have."""

    circuits: tuple[Cross, ...]
    verdict: Verdict

    @property
    def reconfigure(self) -> bool:
        """Whether the switch is to be changed; else it is left alone."""
        return self.verdict in (Verdict.AHEAD, Verdict.LATE)


def plan(snapshot: FabricSnapshot) -> CircuitPlan:
    """Circuits for one phase, keeping lit whatever old circuit also serves the new links.

    The old ones stay (`reconfigure` false, `circuits` the current) where they already fit, where the change would still be under
    way when the phase begins (it then disturbs two phases), and where the phase is too short to gain from it.
    Raises ValueError when an endpoint has more links than ports.
    """
    s = snapshot
    wanted = materialise(s.links, s.current, s.ports_per_endpoint, s.dead)
    if set(wanted) == set(s.current):
        return CircuitPlan(s.current, Verdict.FITS)
    ahead = s.starts_in_s > 0.0
    worth_s = s.reconfiguration_s if ahead else PAYS_OFF * s.reconfiguration_s
    in_time = (not ahead or s.starts_in_s >= s.reconfiguration_s) and (s.lasts_s is None or s.lasts_s >= worth_s)
    if not in_time:
        return CircuitPlan(s.current, Verdict.KEPT)
    return CircuitPlan(wanted, Verdict.AHEAD if ahead else Verdict.LATE)


def materialise(
    links: Sequence[Pair], current: Sequence[Cross], ports_per_endpoint: int, dead: frozenset[int] = frozenset()
) -> tuple[Cross, ...]:
    """Give each link its ports: a duplex circuit that already joins the same endpoints keeps its own, the rest take the lowest free.

    Raises ValueError when an endpoint has more links than ports.
    """
    missing = Counter(links)
    lit = {cross for cross in current if not dead & set(cross)}
    taken = set(dead)
    chosen: list[Cross] = []
    for cross in sorted(lit):
        pair = cross.ingress // ports_per_endpoint, cross.egress // ports_per_endpoint
        if pair[0] < pair[1] and missing[pair] and Cross(cross.egress, cross.ingress) in lit:
            missing[pair] -= 1
            taken |= set(cross)
            chosen += [cross, Cross(cross.egress, cross.ingress)]
    lowest = [endpoint * ports_per_endpoint for endpoint in range(max((b for _, b in missing), default=-1) + 1)]
    for a, b in sorted(missing.elements()):
        here, there = (_free_port(endpoint, lowest, taken, ports_per_endpoint) for endpoint in (a, b))
        chosen += [Cross(here, there), Cross(there, here)]
    return tuple(sorted(chosen))


def _free_port(endpoint: int, lowest: list[int], taken: set[int], ports_per_endpoint: int) -> int:
    """The lowest free port of `endpoint`; those below `lowest` are taken."""
    while lowest[endpoint] in taken:
        lowest[endpoint] += 1
    port = lowest[endpoint]
    if port >= (endpoint + 1) * ports_per_endpoint:
        raise ValueError(f"endpoint {endpoint} has more links than its {ports_per_endpoint} ports, less the dead ones")
    lowest[endpoint] += 1
    return port
