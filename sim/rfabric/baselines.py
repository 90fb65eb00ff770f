"""Other people's ways to choose circuits, for comparison: greedy (as MixNet, SIGCOMM'25) and repeated matching (as TopoOpt, NSDI'23).

Both start from the same reserved connected subgraph as `topology.direct`, which neither paper needs: they keep an electrical network.
"""

import heapq
from collections import Counter
from collections.abc import Mapping, Sequence
from math import inf

from rubato.planning.demand import Links, Pair, heaviest_first
from rubato.planning.topology import reserve


def assignment(weights: Sequence[Sequence[float]]) -> list[int]:
    """For each row its column, each column once, with the largest sum of weights. Ties go the same way every time."""
    num = len(weights)
    row_price, column_price = [0.0] * (num + 1), [0.0] * (num + 1)
    row_of = [num] * (num + 1)
    """Row of each column; column `num` stands for the row that is being placed."""
    for row in range(num):
        row_of[num] = row
        previous, slack, done = [num] * (num + 1), [inf] * num, [False] * (num + 1)
        column = num
        while row_of[column] != num:
            done[column] = True
            here, nearest, step = row_of[column], num, inf
            for other in range(num):
                if done[other]:
                    continue
                reduced = -weights[here][other] - row_price[here] - column_price[other]
                if reduced < slack[other]:
                    slack[other], previous[other] = reduced, column
                if slack[other] < step:
                    step, nearest = slack[other], other
            for other in range(num + 1):
                if done[other]:
                    row_price[row_of[other]] += step
                    column_price[other] -= step
                elif other < num:
                    slack[other] -= step
            column = nearest
        while column != num:
            row_of[column] = row_of[previous[column]]
            column = previous[column]
        row_of[num] = num
    column_of = [0] * num
    for column in range(num):
        column_of[row_of[column]] = column
    return column_of


def greedy(demand: Mapping[Pair, int], ports: Sequence[int]) -> Links:
    """One link after another to the pair that would still carry most bytes per link, among those with a free port at both ends."""
    free = list(ports)
    links = reserve(heaviest_first(demand), free)
    heap = [(-size_bytes / (links[pair] + 1), pair) for pair, size_bytes in demand.items() if size_bytes > 0]
    heapq.heapify(heap)
    while heap:
        _, pair = heapq.heappop(heap)
        if _take(links, free, pair):
            heapq.heappush(heap, (-demand[pair] / (links[pair] + 1), pair))
    return tuple(sorted(links.elements()))


def matching(demand: Mapping[Pair, int], ports: Sequence[int]) -> Links:
    """Rounds of a heaviest assignment on what each pair would carry per link with one more.

    The cycles of the assignment give every endpoint up to two links a round: duplex links need no bipartite matching.
    """
    free = list(ports)
    links = reserve(heaviest_first(demand), free)
    while True:
        weights = [[0.0] * len(ports) for _ in ports]
        for (a, b), size_bytes in demand.items():
            if free[a] and free[b]:
                weights[a][b] = weights[b][a] = size_bytes / (links[a, b] + 1)
        edges = [(weights[a][b], (min(a, b), max(a, b))) for a, b in enumerate(assignment(weights)) if weights[a][b] > 0]
        taken = [_take(links, free, pair) for _, pair in sorted(edges, key=lambda edge: (-edge[0], edge[1]))]
        if not any(taken):
            return tuple(sorted(links.elements()))


def _take(links: Counter[Pair], free: list[int], pair: Pair) -> bool:
    a, b = pair
    if not (free[a] and free[b]):
        return False
    links[pair] += 1
    free[a], free[b] = free[a] - 1, free[b] - 1
    return True
