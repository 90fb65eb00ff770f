"""Collectives: as flows between servers for the network to run, and in closed form where nothing but the NICs limits them.

`n` ranks or servers, `size_bytes` the full buffer, `rate` bytes per second that one of them sends.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise

Transfer = tuple[int, int, float]
"""From one server to another, bytes."""


def all_to_all(groups: Sequence[Sequence[int]], pair_bytes: float) -> Iterator[Transfer]:
    """In each group every server sends `pair_bytes` to every other."""
    return ((a, b, pair_bytes) for group in groups for a in group for b in group if a != b)


def rings(groups: Sequence[Sequence[int]], hop_bytes: float) -> Iterator[Transfer]:
    """In each group two rings that turn against each other, each with half the bytes: both directions of every fibre carry."""
    for group in groups:
        for a, b in pairwise([*group, group[0]]):
            if a != b:
                yield a, b, hop_bytes / 2
                yield b, a, hop_bytes / 2


def chains(groups: Sequence[Sequence[int]], size_bytes: float) -> Iterator[Transfer]:
    """In each group the first server's bytes reach all others, half round either way, passed on piece by piece as they come in."""
    for group in groups:
        for order in (group, [group[0], *group[:0:-1]]):
            yield from ((a, b, size_bytes / 2) for a, b in pairwise(order))


def ring_hop_bytes(n: int, size_bytes: float) -> float:
    """What each rank sends in a reduce-scatter or an all-gather."""
    return (n - 1) / n * size_bytes


def ring_s(n: int, size_bytes: float, rate: float) -> float:
    """Reduce-scatter or all-gather on a ring."""
    return ring_hop_bytes(n, size_bytes) / rate


def ring_all_reduce_s(n: int, size_bytes: float, rate: float) -> float:
    """A reduce-scatter, then an all-gather."""
    return 2 * ring_s(n, size_bytes, rate)
