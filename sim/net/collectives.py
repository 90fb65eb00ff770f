"""Collectives: as flows between servers for the network to run, and in closed form where nothing but the NICs limits them.

`n` ranks or servers, `size_bytes` the full buffer, `rate` bytes per second that one of them sends, `step_s` the latency of a step.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import log2

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


def ring_s(n: int, size_bytes: float, rate: float, step_s: float = 0.0) -> float:
    """Reduce-scatter or all-gather on a ring."""
    return (n - 1) * step_s + ring_hop_bytes(n, size_bytes) / rate


def ring_all_reduce_s(n: int, size_bytes: float, rate: float, step_s: float = 0.0) -> float:
    """A reduce-scatter, then an all-gather."""
    return 2 * ring_s(n, size_bytes, rate, step_s)


def tree_all_reduce_s(n: int, size_bytes: float, rate: float, step_s: float = 0.0) -> float:
    """Double binary tree: every rank sends and gets the buffer about once up and once down."""
    return 2 * step_s * log2(n) + 2 * size_bytes / rate


def all_to_all_s(n: int, size_bytes: float, rate: float) -> float:
    """Each rank's buffer in n equal parts, one of which stays."""
    return (n - 1) / n * size_bytes / rate


def hierarchical_all_reduce_s(servers: int, gpus: int, size_bytes: float, inside: float, outside: float) -> float:
    """Reduce-scatter in the server, all-reduce of each rank's share between servers, all-gather in the server; one after another."""
    within = ring_s(gpus, size_bytes, inside)
    return 2 * within + ring_all_reduce_s(servers, size_bytes / gpus, outside)


def broadcast_s(size_bytes: float, rate: float, hops: int, pieces: int) -> float:
    """Down a chain of `hops` that passes on `pieces` equal pieces as they come in."""
    return size_bytes / rate * (1 + (hops - 1) / pieces)
