"""Decides who pulls a blob from whom: hosts form a tree under the one that has it, or a ring, so each pulls once and none serves many.

Hosts of one pod reach each other by better links than those of another. The tree enters each pod once and goes on from there, so a link
between two pods carries a blob once, however many hosts it has: the two stages of RollMux (section 5) and RFabric (section 4.2).
"""

import re
from collections.abc import Collection, Iterable, Mapping
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rubato.planning.demand import Demand

FANOUT = 2
"""Children per host in its pod. A host's link is shared by its children, and each level adds one piece of delay: two loses least on both."""

CHAIN_BYTES = 64 << 20
"""Per host of a pod: blobs so large go down a chain, where each host's link carries them once. What they are delayed by, a piece of 4 MiB per
host, is a sixteenth of the whole at most."""

POD = "pod="
"""Of a host's labels, the one that begins so names its pod."""

Pods = Mapping[str, str]
"""Host → its pod. Those of which none is known are in one."""

NO_PODS: Pods = {}


def pod_of(labels: Iterable[str]) -> str:
    """The pod of a host with these labels; empty where none of them names one."""
    return min((label for label in labels if label.startswith(POD)), default="").removeprefix(POD)


def plan(root: str, hosts: Collection[str], pods: Pods = NO_PODS, size_bytes: int = 0) -> dict[str, str]:
    """Host → the host it pulls from, for every host but the root.

    Within a pod of n hosts a chain where the blob is large for it, else at most ceil(log2(n)) links deep; the first of each further pod pulls
    from the first of the pod before. Every host that knows the same members finds the same tree, whatever their order, so the tree need not
    be handed out. When a relay dies, plan again without it: what was pulled already stays pulled.
    """
    found: dict[str, str] = {}
    before = ""
    for members in _by_pod(root, hosts, pods):
        if before:
            found[members[0]] = before
        fanout = 1 if size_bytes >= CHAIN_BYTES * len(members) else FANOUT
        found |= {host: members[(index - 1) // fanout] for index, host in enumerate(members) if index}
        before = members[0]
    return found


def ancestors(parents: Mapping[str, str], host: str) -> tuple[str, ...]:
    """From whom `host` pulls, and from whom that one does, up to the root."""
    path: list[str] = []
    while host in parents:
        host = parents[host]
        path.append(host)
    return tuple(path)


def sources(parents: Mapping[str, str], host: str, pods: Pods = NO_PODS) -> tuple[str, ...]:
    """Where `host` may look, best first: up the tree, then the others, its own pod first, of which those below it come last."""
    above = ancestors(parents, host)
    rest = {*parents, *parents.values()} - {host, *above}
    pod = pods.get(host, "")
    return (*above, *sorted(rest, key=lambda h: (host in ancestors(parents, h), pods.get(h, "") != pod, _number(h))))


def ring_sources(root: str, hosts: Collection[str], host: str, pods: Pods = NO_PODS) -> tuple[str, ...]:
    """Where `host` may look when the bytes go around a ring both ways: its two neighbours give half of the pieces each, and the
    others stand in for them. The ring goes through one pod after another."""
    order = _in_order(root, hosts, pods)
    at = order.index(host)
    both = dict.fromkeys((order[at - 1], order[(at + 1) % len(order)]))
    return (*both, *(other for other in order if other != host and other not in both))


def demands(root: str, hosts: Collection[str], size_bytes: int, *, by_rings: bool, pods: Pods = NO_PODS) -> "tuple[Demand, ...]":
    """What each host sends each other one when `hosts` pull along the tree, or around the ring, that all of them find for themselves."""
    order = _in_order(root, hosts, pods)
    if not by_rings or len(order) == 2:
        return tuple((parent, child, size_bytes) for child, parent in plan(root, hosts, pods, size_bytes).items())
    ways = (order, (root, *reversed(order[1:])))
    return tuple((source, target, round(size_bytes / 2)) for way in ways for source, target in pairwise(way))


def _in_order(root: str, hosts: Collection[str], pods: Pods) -> tuple[str, ...]:
    return tuple(host for members in _by_pod(root, hosts, pods) for host in members)


def _by_pod(root: str, hosts: Collection[str], pods: Pods) -> list[list[str]]:
    """The hosts of each pod, the root's own with it in front; names that end in numbers go by these."""
    home = pods.get(root, "")
    found: dict[str, list[str]] = {home: [root]}
    for host in sorted(set(hosts) - {root}, key=lambda host: (pods.get(host, "") != home, pods.get(host, ""), _number(host))):
        found.setdefault(pods.get(host, ""), []).append(host)
    return list(found.values())


def _number(name: str) -> tuple[str, int, str]:
    """`node-2` is before `node-10`."""
    found = re.search(r"[0-9]+$", name)
    return (name[: found.start()], int(found[0]), name) if found else (name, -1, name)
