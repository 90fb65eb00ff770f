"""Chooses a phase's circuits by the time that the phase is predicted to take on them.

A phase's operations take turns: the experts' all-to-all of a layer, then a stage's activations. One run of an operation takes the hops of its
farthest transfer, and what its fullest link carries over that link's rate: the α-β model (Hockney, Parallel Computing 20, 1994) over shortest paths.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Final, NamedTuple

from rubato.planning.demand import Demand, Flows, Links, Pair, flows
from rubato.planning.multihop import carried, one_hop
from rubato.planning.topology import Planner, live_ports

HOP_S: Final = 2e-6
"""α: a packet switch, and 200 m of fibre."""

SHARES: Final = (1.0, 0.75, 0.5, 0.25, 0.0)
"""Operations share circuits by this power of their bytes. By 1 as if all ran at once. By 1/2 the sum of their times is least where they take
turns on the same ports (x minimises Σ bytes / x with Σ x fixed). By 0 each has as many as any other."""


class Operation(NamedTuple):
    """Transfers that run together, between endpoints."""

    directed: Mapping[Pair, int]
    """Bytes of one run."""
    times: float = 1.0
    """How often it runs in the phase."""
    floor_s: float = 0.0
    """One run takes no less, whatever the circuits."""
    beside: bool = False
    """It runs beside the others, and lengthens nothing."""


class LinkRates(NamedTuple):
    """What the circuits are made of."""

    bytes_s: float
    """Of one, each way: 1/β."""
    hop_s: float = HOP_S
    trickle: float | None = None
    """Where endpoints do not forward: what two without a circuit have instead, as a share of one."""


def run_s(operation: Operation, links: Links, num: int, rates: LinkRates) -> float:
    """One run over `links` between `num` endpoints. Raises ValueError where a transfer has no path."""
    if not operation.directed:
        return operation.floor_s
    if rates.trickle is not None:
        return max(operation.floor_s, rates.hop_s + one_hop(operation.directed, links, rates.trickle) / rates.bytes_s)
    number = Counter(links)
    found = carried(operation.directed, links, num)
    fullest = max(v / number[min(pair), max(pair)] for pair, v in found.size_bytes.items())
    return max(operation.floor_s, found.hops * rates.hop_s + fullest / rates.bytes_s)


def phase_s(operations: Sequence[Operation], links: Links, num: int, rates: LinkRates) -> float:
    """All runs of all operations, one after another."""
    return sum(each.times * run_s(each, links, num, rates) for each in operations if not each.beside)


def shared(operations: Sequence[Operation], share: float) -> Flows:
    """Bytes to plan circuits by, with those of each operation scaled so that its part goes by the power `share` of its own: by what its busiest
    endpoint sends or gets. What runs beside counts as it is."""
    busiest = [each.times * _busiest(each.directed) for each in operations]
    most = max((v for v, each in zip(busiest, operations, strict=True) if not each.beside), default=0.0)
    total: dict[Pair, float] = {}
    for v, each in zip(busiest, operations, strict=True):
        weight = each.times * (1.0 if each.beside or not v else (most / v) ** (1.0 - share))
        for pair, size_bytes in each.directed.items():
            total[pair] = total.get(pair, 0.0) + weight * size_bytes
    return {pair: round(v) for pair, v in total.items() if v >= 0.5}


def _busiest(directed: Mapping[Pair, int]) -> float:
    ends: dict[tuple[int, bool], int] = {}
    for pair, size_bytes in directed.items():
        for end, incoming in zip(pair, (False, True), strict=True):
            ends[end, incoming] = ends.get((end, incoming), 0) + size_bytes
    return max(ends.values(), default=0)


def choose_links(
    operations: Sequence[Operation], ports: Sequence[int], planner: Planner, rates: LinkRates, shares: Sequence[float] = SHARES
) -> Links:
    """The links of `planner` for the share with which the phase is predicted to be shortest; on a tie the first one's.

    Raises ValueError where the ports can't connect the endpoints.
    """
    alone = sum(not each.beside for each in operations) < 2
    candidates = dict.fromkeys(planner(shared(operations, share), ports) for share in (shares[:1] if alone else shares))
    if len(candidates) == 1:
        return next(iter(candidates))
    return min(candidates, key=lambda links: phase_s(operations, links, len(ports), rates))


def template(
    turns: Sequence[Sequence[Demand]],
    endpoints: Sequence[str],
    ports_per_endpoint: int,
    dead: Collection[int],
    planner: Planner,
    rates: LinkRates,
) -> Links:
    """The links for traffic that takes turns, each turn once, without the `dead` ports of the switch (endpoint i owns the i-th block of ports).

    Raises ValueError where the ports can't connect the endpoints.
    """
    ports = live_ports(len(endpoints), ports_per_endpoint, dead)
    return choose_links([Operation(flows(traffic, endpoints)) for traffic in turns], ports, planner, rates)
