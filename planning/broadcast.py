"""Plans how weights reach every pod from one, under port limits: by a tree (RFabric, §4.2) or by counter-rotating rings.

Light can't be split by the switch: every copy is made by a relay. Endpoint 0 is the source in the order that is given.
"""

from collections.abc import Collection, Sequence
from typing import NamedTuple

from planning.demand import Demand, Links, Pair
from planning.relay import FANOUT
from planning.relay import plan as relay_tree


class Hop(NamedTuple):
    """Over the link from one endpoint to the next, in pieces as they come in."""

    source: int
    target: int
    share: float
    """Of all the bytes."""
    stream: int
    """Which part of the bytes: hops of one stream carry the same ones."""


class Broadcast(NamedTuple):
    """The links of the phase, and what goes over them."""

    links: Links
    hops: tuple[Hop, ...]
    seconds_per_byte: float
    """On the fullest link, in units of one link's time for a byte: 1/u for rings, the least that u ports can do."""
    depth: int
    """Hops from the source to the last endpoint."""

    def seconds(self, size_bytes: float, link_bytes_s: float, num_pieces: int) -> float:
        """With the bytes cut into pieces of equal size that relays pass on one by one: depth - 1 pieces more than the bytes themselves."""
        if not self.hops:
            return 0.0
        return size_bytes * self.seconds_per_byte / link_bytes_s * (1 + (self.depth - 1) / num_pieces)


def bound_s(size_bytes: float, ports: int, link_bytes_s: float) -> float:
    """No broadcast is faster: every endpoint must take in S bytes through u ports of B bytes/s, S / (u B) (min-cut; Edmonds)."""
    return size_bytes / (ports * link_bytes_s)


def tree(num: int, ports: int, *, fanout: int = 2) -> Broadcast:
    """A relay tree; every endpoint divides its ports evenly among its parent and its children.

    Raises ValueError when there are fewer ports than neighbours.
    """
    if num < 2:
        return Broadcast((), (), 0.0, 0)
    names = [f"{i:09d}" for i in range(num)]
    parents = relay_tree(names[0], names[1:], fanout=fanout).parents
    edges = [(int(parent), int(child)) for child, parent in sorted(parents.items())]
    neighbours = [sum(node in edge for edge in edges) for node in range(num)]
    if any(n > ports for n in neighbours):
        raise ValueError(
            f"a tree of fan-out {fanout} has endpoints with {max(neighbours)} neighbours, but {ports} ports each"
        )
    number: dict[Pair, int] = {edge: min(ports // neighbours[edge[0]], ports // neighbours[edge[1]]) for edge in edges}
    links = tuple(sorted((min(e), max(e)) for e, n in number.items() for _ in range(n)))
    level = [0] * num
    for parent, child in edges:
        level[child] = level[parent] + 1
    hops = tuple(Hop(parent, child, 1.0, 0) for parent, child in edges)
    return Broadcast(links, hops, 1 / min(number.values(), default=1), max(level, default=0))


def rings(num: int, ports: int) -> Broadcast:
    """One ring through all endpoints with half the ports to either neighbour; half of the bytes goes round each way.

    Every direction of every link then carries at most S / u, whatever the number of endpoints: the bound is reached but for the
    filling of the pipeline. Two endpoints use all ports for one link bundle. Raises ValueError with an odd number of ports.
    """
    if num < 2:
        return Broadcast((), (), 0.0, 0)
    if num == 2:
        return Broadcast(((0, 1),) * ports, (Hop(0, 1, 1.0, 0),), 1 / ports, 1)
    if ports % 2 or ports < 2:
        raise ValueError(f"rings take ports in pairs, not {ports}")
    links = tuple(sorted((min(e), max(e)) for e in _around(range(num)) for _ in range(ports // 2)))
    there, back = [*range(num)], [0, *range(num - 1, 0, -1)]
    hops = tuple(Hop(a, b, 0.5, way) for way, order in enumerate((there, back)) for a, b in _around(order)[:-1])
    return Broadcast(links, hops, 0.5 / (ports // 2), num - 1)


def best(num: int, ports: int, num_pieces: int) -> tuple[str, Broadcast]:
    """Rings or tree, whichever ends first with so many pieces: a long ring takes long to fill."""
    found = {"tree": tree(num, ports, fanout=2)} if ports >= min(3, (num + 1) // 2) else {}
    if num <= 2 or ports % 2 == 0:
        found["rings"] = rings(num, ports)
    if not found:
        raise ValueError(f"{ports} ports are too few to reach {num} endpoints")
    name = min(found, key=lambda name: (found[name].seconds(1.0, 1.0, num_pieces), name))
    return name, found[name]


def demands(root: str, hosts: Collection[str], size_bytes: int, *, by_rings: bool) -> tuple[Demand, ...]:
    """What each host sends each other one when `hosts` pull along the relay tree, or around the ring, that all of them find for themselves."""
    names = (root, *sorted(set(hosts) - {root}))
    found = rings(len(names), 2) if by_rings else tree(len(names), FANOUT + 1)
    return tuple((names[hop.source], names[hop.target], round(hop.share * size_bytes)) for hop in found.hops)


def _around(order: Sequence[int]) -> list[Pair]:
    return [(order[i], order[(i + 1) % len(order)]) for i in range(len(order))]
