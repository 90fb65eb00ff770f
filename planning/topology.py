"""Decides how many direct links each pair of endpoints gets in a phase, so that the slowest pair is as fast as can be."""

import heapq
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence

from planning.demand import Demand, Flows, Links, Pair, flows, heaviest_first, per_link
from planning.reserve import reserve

Planner = Callable[[Flows, Sequence[int]], Links]
"""Links for the bytes of each direction, with each endpoint's ports as the limit."""


def template(
    traffic: Sequence[Demand],
    endpoints: Sequence[str],
    ports_per_endpoint: int,
    dead: Collection[int] = (),
    planner: Planner | None = None,
) -> Links:
    """The links of a phase from its traffic, without the `dead` ports of the switch (endpoint i owns the i-th block of ports).

    They are the `direct` ones where no other `planner` is given.
    Raises ValueError where the ports can't connect the endpoints.
    """
    ports = [ports_per_endpoint] * len(endpoints)
    for port in set(dead):
        if port // ports_per_endpoint < len(ports):
            ports[port // ports_per_endpoint] -= 1
    directed = flows(traffic, endpoints)
    return planner(directed, ports) if planner else direct(per_link(directed), ports)


def direct(demand: Mapping[Pair, int], ports: Sequence[int]) -> Links:
    """Links X over the reserved subgraph R that minimise the largest demand per link, max D / X, with each endpoint's ports as the limit.

    Where all pairs with demand can have a link the minimum T is exact, the one that a bisection on T finds with X = max(R, ceil(D / T)):
    the slowest pair gets one link more for as long as it can, and a pair that is the slowest above T never has ceil(D / T) yet.
    Where there are more partners than ports, the heaviest pairs get links and the rest goes over several hops
    of the connected graph. Ports left over go to whichever pair has most bytes per link. Raises ValueError where the ports
    can't connect the endpoints.
    """
    free = list(ports)
    heavy = heaviest_first(demand)
    links = reserve(heavy, free)
    for pair in heavy:
        if not links[pair] and free[pair[0]] and free[pair[1]]:
            _add(links, free, pair)
    heap = [(-demand[pair] / number, pair) for pair, number in links.items() if number and demand.get(pair)]
    heapq.heapify(heap)
    while heap:
        _, pair = heapq.heappop(heap)
        if free[pair[0]] and free[pair[1]]:
            _add(links, free, pair)
            heapq.heappush(heap, (-demand[pair] / links[pair], pair))
    return tuple(sorted(links.elements()))


def _add(links: Counter[Pair], free: list[int], pair: Pair) -> None:
    links[pair] += 1
    free[pair[0]] -= 1
    free[pair[1]] -= 1
