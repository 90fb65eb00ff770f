"""The traffic of one phase, as bytes between the endpoints of the fabric (racks, pods, or single processes)."""

from collections.abc import Mapping, Sequence

Demand = tuple[str, str, int]
"""Bytes from one named endpoint to another."""

Pair = tuple[int, int]
"""Two endpoints by index. As a link: the smaller first."""

Flows = dict[Pair, int]
"""Bytes by (from, to)."""

Links = tuple[Pair, ...]
"""Duplex links, sorted; a pair of endpoints may have several."""


def flows(traffic: Sequence[Demand], endpoints: Sequence[str]) -> Flows:
    """Bytes per direction. What a name outside `endpoints` sends or gets is left to the electrical path."""
    index = {name: i for i, name in enumerate(endpoints)}
    found: Flows = {}
    for source, target, size_bytes in traffic:
        a, b = index.get(source), index.get(target)
        if a is not None and b is not None and a != b and size_bytes > 0:
            found[a, b] = found.get((a, b), 0) + size_bytes
    return found


def per_link(directed: Mapping[Pair, int]) -> Flows:
    """Bytes that a single link between two endpoints would be busy with: a link is duplex, so the fuller direction counts."""
    found: Flows = {}
    for (a, b), size_bytes in directed.items():
        pair = (a, b) if a < b else (b, a)
        if size_bytes > found.get(pair, 0):
            found[pair] = size_bytes
    return found


def heaviest_first(demand: Mapping[Pair, int]) -> list[Pair]:
    """The pairs that have demand; equal ones in their own order."""
    return [pair for _, pair in sorted((-size_bytes, pair) for pair, size_bytes in demand.items() if size_bytes > 0)]
