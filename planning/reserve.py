"""Reserves the connected subgraph of a phase: above the racks there is no electrical network that would carry what has no circuit."""

from collections import Counter
from collections.abc import Sequence
from itertools import chain, combinations

from planning.demand import Pair


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
