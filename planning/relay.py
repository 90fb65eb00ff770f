"""Decides who pulls a blob from whom: hosts form a tree under the one that has it, so each pulls once and none serves many."""

from collections.abc import Collection, Mapping
from typing import NamedTuple

FANOUT = 2
"""Children per host. A host's link is shared by its children, and each level adds one piece of delay: two loses least on both."""


class RelayTree(NamedTuple):
    """Host → the host it pulls from, for every host but the root. `why` is for the log."""

    root: str
    parents: Mapping[str, str]
    why: str


def plan(root: str, hosts: Collection[str], *, fanout: int = FANOUT) -> RelayTree:
    """The tree over `hosts`, all alive, whatever their order; at most ceil(log2(number of hosts, root included)) links deep.

    Every host that knows the same members finds the same tree, so nobody has to hand it out. When a relay dies, plan again
    without it: what was pulled already stays pulled.
    """
    if fanout < 2:
        raise ValueError(f"a relay serves two hosts or more, not {fanout}")
    order = [root, *sorted(set(hosts) - {root})]
    parents = {host: order[(index - 1) // fanout] for index, host in enumerate(order) if index}
    return RelayTree(root, parents, f"{len(parents)} hosts pull from {root} in {depth(root, parents)} levels")


def depth(root: str, parents: Mapping[str, str]) -> int:
    """Links from the root to the host furthest from it."""
    return max((len(ancestors(root, parents, host)) for host in parents), default=0)


def ancestors(root: str, parents: Mapping[str, str], host: str) -> tuple[str, ...]:
    """From whom `host` pulls, and from whom that one does, up to the root."""
    path: list[str] = []
    while host != root:
        host = parents[host]
        path.append(host)
    return tuple(path)


def ring_sources(root: str, hosts: Collection[str], host: str) -> tuple[str, ...]:
    """Where `host` may look when the bytes go around a ring both ways: its two neighbours give half of the pieces each, and the
    others stand in for them."""
    order = (root, *sorted(set(hosts) - {root}))
    at = order.index(host)
    both = dict.fromkeys((order[at - 1], order[(at + 1) % len(order)]))
    return (*both, *(other for other in order if other != host and other not in both))


def sources(tree: RelayTree, host: str) -> tuple[str, ...]:
    """Where `host` may look, best first: up the tree, then the others, of which those below it come last."""
    above = ancestors(tree.root, tree.parents, host)
    rest = [h for h in (tree.root, *sorted(tree.parents)) if h != host and h not in above]
    return (*above, *sorted(rest, key=lambda h: host in ancestors(tree.root, tree.parents, h)))
