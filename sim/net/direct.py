"""Optical fabrics: nodes (racks, or servers) that circuits join; packets are relayed by nodes, along shortest paths."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from rubato.sim.net.maxmin import Ints, Paths
from rubato.sim.net.network import Network


class DirectSpec(NamedTuple):
    """Servers in nodes of equal size. Rates are bytes per second."""

    servers: int
    servers_per_node: int
    nic_bytes_s: float
    nics: int = 8
    """Per server; where a node is a server these are the circuits' ends and no links of their own."""


def direct_network(spec: DirectSpec, links: Sequence[tuple[int, int]]) -> Network:
    """Links: every server up and down (where nodes have several), then both directions of every pair with circuits, sorted.

    `links` are duplex circuits between nodes; several of one pair add up. A route between unconnected nodes raises ValueError.
    """
    number: dict[tuple[int, int], int] = defaultdict(int)
    for a, b in links:
        number[a, b] += 1
        number[b, a] += 1
    arcs = sorted(number)
    has_nics = spec.servers_per_node > 1
    base = 2 * spec.servers if has_nics else 0
    capacity = np.array([spec.nics] * base + [number[arc] for arc in arcs]) * spec.nic_bytes_s
    names = [f"server{i} {way}" for way in ("up", "down") for i in range(base // 2)]
    names += [f"circuit {a}>{b}" for a, b in arcs]
    neighbours: dict[int, list[int]] = defaultdict(list)
    for a, b in arcs:
        neighbours[a].append(b)
    link_of = {arc: base + i for i, arc in enumerate(arcs)}

    def route(source: Ints, target: Ints) -> Paths:
        pairs = list(zip((source // spec.servers_per_node).tolist(), (target // spec.servers_per_node).tolist(), strict=True))
        routes = {pair: [link_of[arc] for arc in arcs] for pair, arcs in shortest(neighbours, set(pairs)).items()}
        start, found = [0], list[int]()
        for s, t, pair in zip(source.tolist(), target.tolist(), pairs, strict=True):
            hops = routes[pair]
            found += [s, *hops, spec.servers + t] if has_nics and s != t else hops
            start.append(len(found))
        return Paths(np.array(start), np.array(found, dtype=np.int64))

    return Network(names, capacity, route)


def shortest(neighbours: Mapping[int, Sequence[int]], pairs: set[tuple[int, int]]) -> dict[tuple[int, int], list[tuple[int, int]]]:
    """A shortest path per pair of nodes, as arcs; among equal ones the choice turns with the target, to spread the load."""
    wanted: dict[int, set[int]] = defaultdict(set)
    for a, b in pairs:
        wanted[a].add(b)
    found: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for source in sorted(wanted):
        before = _search(neighbours, source, wanted[source])
        for target in sorted(wanted[source]):
            if target not in before:
                raise ValueError(f"no circuits lead from node {source} to node {target}")
            arcs: list[tuple[int, int]] = []
            node = target
            while node != source:
                choices = before[node]
                parent = choices[(source + target) % len(choices)]
                arcs.append((parent, node))
                node = parent
            found[source, target] = arcs[::-1]
    return found


def _search(neighbours: Mapping[int, Sequence[int]], source: int, targets: set[int]) -> dict[int, list[int]]:
    """Breadth first, until all targets are found: the nodes before each node on its shortest paths."""
    away = {source: 0}
    before: dict[int, list[int]] = {source: []}
    layer, missing = [source], set(targets) - {source}
    distance = 0
    while layer and missing:
        following: list[int] = []
        distance += 1
        for node in layer:
            for other in neighbours.get(node, ()):
                known = away.get(other)
                if known is None:
                    away[other] = distance
                    before[other] = [node]
                    following.append(other)
                elif known == distance:
                    before[other].append(node)
        missing.difference_update(following)
        layer = following
    return before
