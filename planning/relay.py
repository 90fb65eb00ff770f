"""Decides who pulls a blob from whom: hosts form a tree under the one that has it, or a ring, so each pulls once and none serves many."""

from collections.abc import Collection, Mapping
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rubato.planning.demand import Demand

FANOUT = 2
"""Children per host. A host's link is shared by its children, and each level adds one piece of delay: two loses least on both."""


def plan(root: str, hosts: Collection[str]) -> dict[str, str]:
    """Host → the host it pulls from, for every host but the root; at most ceil(log2(number of hosts, root included)) links deep.

    Every host that knows the same members finds the same tree, whatever their order, so the tree need not be handed out. When a relay dies,
    plan again without it: what was pulled already stays pulled.
    """
    order = _in_order(root, hosts)
    return {host: order[(index - 1) // FANOUT] for index, host in enumerate(order) if index}


def ancestors(parents: Mapping[str, str], host: str) -> tuple[str, ...]:
    """From whom `host` pulls, and from whom that one does, up to the root."""
    path: list[str] = []
    while host in parents:
        host = parents[host]
        path.append(host)
    return tuple(path)


def sources(parents: Mapping[str, str], host: str) -> tuple[str, ...]:
    """Where `host` may look, best first: up the tree, then the others, of which those below it come last."""
    above = ancestors(parents, host)
    rest = {*parents, *parents.values()} - {host, *above}
    return (*above, *sorted(rest, key=lambda h: (host in ancestors(parents, h), h)))


def ring_sources(root: str, hosts: Collection[str], host: str) -> tuple[str, ...]:
    """Where `host` may look when the bytes go around a ring both ways: its two neighbours give half of the pieces each, and the
    others stand in for them."""
    order = _in_order(root, hosts)
    at = order.index(host)
    both = dict.fromkeys((order[at - 1], order[(at + 1) % len(order)]))
    return (*both, *(other for other in order if other != host and other not in both))


def demands(root: str, hosts: Collection[str], size_bytes: int, *, by_rings: bool) -> "tuple[Demand, ...]":
    """What each host sends each other one when `hosts` pull along the tree, or around the ring, that all of them find for themselves."""
    order = _in_order(root, hosts)
    if not by_rings or len(order) == 2:
        return tuple((parent, child, size_bytes) for child, parent in plan(root, hosts).items())
    ways = (order, (root, *reversed(order[1:])))
    return tuple((source, target, round(size_bytes / 2)) for way in ways for source, target in pairwise(way))


def _in_order(root: str, hosts: Collection[str]) -> tuple[str, ...]:
    return (root, *sorted(set(hosts) - {root}))
