"""Decides how many direct links each pair of endpoints gets in a phase, so that the slowest pair is as fast as can be.

The links always hold a connected subgraph: above the racks there is no electrical network that would carry what has no circuit.
"""

import heapq
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import chain, combinations

from rubato.planning.demand import Flows, Links, Pair, heaviest_first


def reserve(heavy: Sequence[Pair], free: list[int]) -> Counter[Pair]:
    """A spanning tree within the ports that are `free` per endpoint, of the pairs in `heavy` as far as may be, the first ones first; takes its ports from `free`.

    What has no bytes is joined over the endpoints that have fewest partners, so that it costs the busy ones no port it need not.
    Kruskal's algorithm with bounded degrees: two parts are joined only when the joined one keeps a free port, unless nothing else is
    left. With two ports per endpoint on average, and one each, some join is always possible: parts that may not join have one
    free port each, and there are fewer such ports than the 2(k-1) that k parts have left.
    Raises ValueError where the ports can't connect the endpoints.
    """
    num = len(free)
    if num > 1 and (min(free) < 1 or sum(free) < 2 * (num - 1)):
        raise ValueError(
            f"{sum(free)} ports, {min(free)} at the poorest endpoint, can't connect {num} endpoints: "
            f"each needs one, together they need {2 * (num - 1)}"
        )
    parts = [{node} for node in range(num)]
    part_of = list(range(num))
    part_free = list(free)
    left = num
    links: Counter[Pair] = Counter()
    busy = [0] * num
    for a, b in heavy:
        busy[a], busy[b] = busy[a] + 1, busy[b] + 1
    idle_first = sorted(range(num), key=lambda node: (busy[node], node))
    while left > 1:
        for one, other in chain(heavy, combinations(idle_first, 2)):
            a, b = (one, other) if one < other else (other, one)
            ours, theirs = part_of[a], part_of[b]
            if ours == theirs or not (free[a] and free[b]):
                continue
            if left > 2 and part_free[ours] + part_free[theirs] <= 2:
                continue
            free[a], free[b] = free[a] - 1, free[b] - 1
            links[a, b] += 1
            for node in parts[theirs]:
                part_of[node] = ours
            parts[ours] |= parts[theirs]
            part_free[ours] += part_free[theirs] - 2
            left -= 1
            if left == 1:
                break
    return links


Planner = Callable[[Flows, Sequence[int]], Links]
"""Links for the bytes of each direction, with each endpoint's ports as the limit."""


def live_ports(num: int, ports_per_endpoint: int, dead: Collection[int] = ()) -> list[int]:
    """Of each endpoint, without the `dead` ones of the switch."""
    ports = [ports_per_endpoint] * num
    for port in set(dead):
        if port // ports_per_endpoint < num:
            ports[port // ports_per_endpoint] -= 1
    return ports


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
