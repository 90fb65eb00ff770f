"""Decides which optical circuits a phase gets, and whether changing to them is worth the dark time.

Endpoint i of the fabric owns the switch's ports i·u … i·u+u-1, each with both directions of fibre. A link between two
endpoints takes one port of each and is two circuits, one per direction; links of a phase always connect all endpoints.
"""

import heapq
from collections import Counter
from collections.abc import Sequence
from itertools import combinations
from typing import Final, NamedTuple

PAYS_OFF: Final = 10.0
"""A change in a phase that already runs is made only when the phase lasts this many times the delay: below, the electrical
path has carried it before the circuits have paid for their dark time."""

FITS: Final = "the circuits in place already fit"
AHEAD: Final = "changes before the phase begins"
LATE: Final = "changes in the running phase, which lasts long enough to gain"
KEPT: Final = "the window is shorter than the delay: the old circuits stay"

Demand = tuple[str, str, int]
"""Bytes from one endpoint to another."""

Pair = tuple[int, int]
"""A link between two endpoints, by index, smaller first."""


class Cross(NamedTuple):
    """A circuit from an input port to an output port of the switch."""

    ingress: int
    egress: int


class FabricSnapshot(NamedTuple):
    """What the planner is told about the fabric and the phase to come."""

    endpoints: tuple[str, ...]
    ports_per_endpoint: int
    traffic: tuple[Demand, ...]
    """Profiled bytes of the phase; used where `template` is None."""
    template: tuple[Pair, ...] | None
    """The phase's cached links; None while it has none."""
    current: tuple[Cross, ...]
    """What the switch holds."""
    starts_in_s: float
    """Time until the phase begins; 0 or less when it runs."""
    lasts_s: float | None
    """How long the phase runs once begun; None while unknown, which counts as long."""
    reconfiguration_s: float
    """Time from asking for new circuits to using them."""


class CircuitPlan(NamedTuple):
    """Circuits that the phase should have. With `reconfigure` false the switch is left alone."""

    circuits: tuple[Cross, ...]
    reconfigure: bool
    why: str


def plan(snapshot: FabricSnapshot) -> CircuitPlan:
    """Circuits for one phase, keeping lit whatever old circuit also serves the new links.

    The old ones stay (`reconfigure` false, `circuits` the current) where they already fit, where the change would still be under
    way when the phase begins (it then disturbs two phases), and where the phase is too short to gain from it.
    Raises ValueError when the ports can't connect the endpoints.
    """
    s = snapshot
    links = s.template if s.template is not None else template(s.traffic, s.endpoints, s.ports_per_endpoint)
    wanted = materialise(links, s.current, s.ports_per_endpoint)
    if set(wanted) == set(s.current):
        return CircuitPlan(s.current, False, FITS)
    ahead = s.starts_in_s > 0.0
    worth_s = s.reconfiguration_s if ahead else PAYS_OFF * s.reconfiguration_s
    in_time = (not ahead or s.starts_in_s >= s.reconfiguration_s) and (s.lasts_s is None or s.lasts_s >= worth_s)
    if not in_time:
        return CircuitPlan(s.current, False, KEPT)
    return CircuitPlan(wanted, True, AHEAD if ahead else LATE)


def template(traffic: Sequence[Demand], endpoints: Sequence[str], ports_per_endpoint: int) -> tuple[Pair, ...]:
    """Links for a traffic matrix, sorted; a pair may appear several times.

    First a spanning tree, heaviest pairs first, so that every endpoint stays reachable; then each remaining pair of free
    ports goes to the pair that would still carry most bytes per link. Demands of names outside `endpoints` are left to the electrical path.
    Raises ValueError for fewer than two ports per endpoint where there are more than two endpoints.
    """
    if ports_per_endpoint < 1 or (ports_per_endpoint < 2 and len(endpoints) > 2):
        raise ValueError(
            f"{ports_per_endpoint} port(s) per endpoint can't connect {len(endpoints)} endpoints: give at least 2"
        )
    demand = _demand(traffic, endpoints)
    free = [ports_per_endpoint] * len(endpoints)
    links = _tree(demand, free)
    heap = [(-total / (links[pair] + 1), pair) for pair, total in demand.items() if total > 0]
    heapq.heapify(heap)
    while heap:
        _, (a, b) = heapq.heappop(heap)
        if free[a] and free[b]:
            free[a], free[b] = free[a] - 1, free[b] - 1
            links[a, b] += 1
            heapq.heappush(heap, (-demand[a, b] / (links[a, b] + 1), (a, b)))
    return tuple(sorted(links.elements()))


def materialise(links: Sequence[Pair], current: Sequence[Cross], ports_per_endpoint: int) -> tuple[Cross, ...]:
    """Give each link its ports: a duplex circuit that already joins the same endpoints keeps its own, the rest take the lowest free.

    Raises ValueError when an endpoint has more links than ports.
    """
    missing = Counter(links)
    lit = set(current)
    taken: set[int] = set()
    chosen: list[Cross] = []
    for cross in sorted(lit):
        pair = cross.ingress // ports_per_endpoint, cross.egress // ports_per_endpoint
        if pair[0] < pair[1] and missing[pair] and Cross(cross.egress, cross.ingress) in lit:
            missing[pair] -= 1
            taken |= set(cross)
            chosen += [cross, Cross(cross.egress, cross.ingress)]
    for a, b in sorted(missing.elements()):
        here, there = _free_port(a, taken, ports_per_endpoint), _free_port(b, taken, ports_per_endpoint)
        chosen += [Cross(here, there), Cross(there, here)]
    return tuple(sorted(chosen))


def _demand(traffic: Sequence[Demand], endpoints: Sequence[str]) -> dict[Pair, int]:
    """Bytes per pair, both directions together (a link is duplex); pairs without any are listed with 0."""
    index = {name: i for i, name in enumerate(endpoints)}
    demand = dict.fromkeys(combinations(range(len(endpoints)), 2), 0)
    for source, target, size_bytes in traffic:
        a, b = index.get(source), index.get(target)
        if a is not None and b is not None and a != b:
            demand[min(a, b), max(a, b)] += size_bytes
    return demand


def _tree(demand: dict[Pair, int], free: list[int]) -> Counter[Pair]:
    """Kruskal with a bound on degrees, heaviest pairs first; takes ports from `free`.

    It can't get stuck with two ports each: a tree over k endpoints uses 2(k-1) of its 2k ports, so a free one is left in it.
    """
    parent = list(range(len(free)))

    def root(node: int) -> int:
        while parent[node] != node:
            parent[node] = node = parent[parent[node]]
        return node

    links: Counter[Pair] = Counter()
    for a, b in sorted(demand, key=lambda pair: (-demand[pair], pair)):
        if free[a] and free[b] and root(a) != root(b):
            parent[root(a)] = root(b)
            free[a], free[b] = free[a] - 1, free[b] - 1
            links[a, b] += 1
    return links


def _free_port(endpoint: int, taken: set[int], ports_per_endpoint: int) -> int:
    for port in range(endpoint * ports_per_endpoint, (endpoint + 1) * ports_per_endpoint):
        if port not in taken:
            taken.add(port)
            return port
    raise ValueError(f"endpoint {endpoint} has more links than its {ports_per_endpoint} ports")
