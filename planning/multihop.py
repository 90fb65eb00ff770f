"""Circuits where not every pair has one: a linear program chooses how many links each pair gets; bytes travel by shortest paths."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from rubato.planning.demand import Links, Pair, per_link
from rubato.planning.topology import direct, reserve


class LinearProgram(NamedTuple):
    """Minimise x[0] over x ≥ 0. Rows are (row, column, coefficient); equations equal `equal_to`, bounds stay at or below 0."""

    num_variables: int
    equations: tuple[tuple[int, int, float], ...]
    equal_to: tuple[float, ...]
    bounds: tuple[tuple[int, int, float], ...]
    num_bounds: int


Solver = Callable[[LinearProgram], Sequence[float]]
"""Returns an optimal x. Planning imports no numerical library: the caller brings one."""


class Carried(NamedTuple):
    """How traffic travels over links."""

    size_bytes: dict[Pair, float]
    """Per direction of each pair of neighbours."""
    hops: int
    """Of the farthest flow."""


def carried(directed: Mapping[Pair, int], links: Links, num: int) -> Carried:
    """Every flow over its shortest paths, split by the links that lead there. Raises ValueError where a flow has no path."""
    near: list[Counter[int]] = [Counter() for _ in range(num)]
    for a, b in links:
        near[a][b] += 1
        near[b][a] += 1
    by_source: dict[int, dict[int, float]] = {}
    for (a, b), size_bytes in sorted(directed.items()):
        by_source.setdefault(a, {})[b] = float(size_bytes)
    found: dict[Pair, float] = {}
    hops = 0
    for source, wanted in by_source.items():
        away, order, missing = {source: 0}, [source], wanted.keys() - {source}
        for node in order:
            if not missing:
                break
            further = [other for other in near[node] if other not in away]
            away.update(dict.fromkeys(further, away[node] + 1))
            order += further
            missing.difference_update(further)
        if missing:
            raise ValueError(f"no path leads from endpoint {source} to {sorted(missing)}")
        hops = max(hops, *(away[node] for node in wanted))
        for node in reversed(order[1:]):
            through = wanted.get(node, 0.0)
            if not through:
                continue
            before = {other: n for other, n in near[node].items() if away.get(other) == away[node] - 1}
            for other, number in before.items():
                share = through * number / sum(before.values())
                found[other, node] = found.get((other, node), 0.0) + share
                wanted[other] = wanted.get(other, 0.0) + share
    return Carried(found, hops)


def one_hop(directed: Mapping[Pair, int], links: Links, trickle: float) -> float:
    """Bytes over the fullest link where no host forwards: a pair without a link has `trickle` of one."""
    number = Counter(links)
    return max((v / (number[min(p), max(p)] or trickle) for p, v in directed.items()), default=0.0)


def bottleneck(directed: Mapping[Pair, int], links: Links, num: int) -> float:
    """Bytes over the fullest link by shortest paths; over its bandwidth, the time that the traffic takes."""
    number = Counter(links)
    return max((v / number[min(a, b), max(a, b)] for (a, b), v in carried(directed, links, num).size_bytes.items()), default=0.0)


def capacity_program(directed: Mapping[Pair, int], ports: Sequence[int]) -> LinearProgram:
    """x[0] is the least possible bytes over the fullest link when links may be fractions, between any two endpoints.

    A lower bound for every choice of links. x[1 + k] is what the k-th pair (sorted) carries in its fuller direction.
    """
    num = len(ports)
    pairs = [(a, b) for a in range(num) for b in range(a + 1, num)]
    arcs = [arc for a, b in pairs for arc in ((a, b), (b, a))]
    sources = sorted({a for a, _ in directed})
    first = 1 + len(pairs)
    bounds: list[tuple[int, int, float]] = []
    for row in range(len(arcs)):
        bounds.append((row, 1 + row // 2, -1.0))
        bounds += [(row, first + s * len(arcs) + row, 1.0) for s in range(len(sources))]
    for node in range(num):
        bounds.append((len(arcs) + node, 0, -float(ports[node])))
        bounds += [(len(arcs) + node, 1 + k, 1.0) for k, pair in enumerate(pairs) if node in pair]
    equations, equal_to = _conservation(directed, sources, arcs, num, first=first)
    return LinearProgram(first + len(sources) * len(arcs), equations, equal_to, tuple(bounds), len(arcs) + num)


def multi_hop(directed: Mapping[Pair, int], ports: Sequence[int], solve: Solver) -> Links:
    """Links by the linear program, rounded to whole ones over the reserved subgraph; the direct ones where they do better.

    Better is judged by shortest paths. The program has endpoints³ variables: for some dozens of endpoints.
    """
    num = len(ports)
    plain = direct(per_link(directed), ports)
    if not directed:
        return plain
    solution = solve(capacity_program(directed, ports))
    pairs = [(a, b) for a in range(num) for b in range(a + 1, num)]
    wanted = {pair: solution[1 + k] / solution[0] for k, pair in enumerate(pairs)}
    free = list(ports)
    links = reserve(sorted((p for p in pairs if wanted[p] > 0), key=lambda p: (-wanted[p], p)), free)
    while open_pairs := [p for p in pairs if free[p[0]] and free[p[1]] and wanted[p] > links[p] + 1e-6]:
        pair = max(open_pairs, key=lambda p: (wanted[p] - links[p], p))
        links[pair] += 1
        free[pair[0]], free[pair[1]] = free[pair[0]] - 1, free[pair[1]] - 1
    rounded = tuple(sorted(links.elements()))
    return min(plain, rounded, key=lambda candidate: bottleneck(directed, candidate, num))


def _conservation(
    directed: Mapping[Pair, int], sources: Sequence[int], arcs: Sequence[Pair], num: int, *, first: int
) -> tuple[tuple[tuple[int, int, float], ...], tuple[float, ...]]:
    """What enters a node of a source's flow, less what leaves it, stays there. Flows of one source are one commodity."""
    rows: list[tuple[int, int, float]] = []
    stays: list[float] = []
    for s, source in enumerate(sources):
        row_of = {node: len(stays) + i for i, node in enumerate(n for n in range(num) if n != source)}
        stays += [float(directed.get((source, node), 0)) for node in row_of]
        for k, (a, b) in enumerate(arcs):
            column = first + s * len(arcs) + k
            rows += [(row_of[node], column, sign) for node, sign in ((b, 1.0), (a, -1.0)) if node != source]
    return tuple(rows), tuple(stays)
