"""A network as the simulator sees it: links with capacities, a route for every pair of servers, and flows that run until they end."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from rubato.sim.net.maxmin import Floats, Ints, Paths, max_min_rates

TOGETHER = 1e-9
"""Only rounding keeps such flows apart."""


class Flows(NamedTuple):
    """Transfers between servers that begin together."""

    source: Ints
    target: Ints
    size_bytes: Floats
    """Of the whole transfer, over all its NICs."""
    width: Floats
    """How many NICs take part: a transfer of width w counts as w flows."""


class Network(NamedTuple):
    """Directed links; `route` gives the links between pairs of servers, none where both are the same one."""

    names: Sequence[str]
    capacity: Floats
    """Bytes per second."""
    route: Callable[[Ints, Ints], Paths]
    per_nic: bool = False
    """Whether the NICs of one transfer may take different routes: it then runs as flows of width 1."""
    together: float = TOGETHER
    """Flows that end within this share of the time so far end at once; rates are set anew so many times fewer."""


class FlowsDone(NamedTuple):
    """How flows ran."""

    seconds: float
    """Until the last one ended."""
    finish_s: Floats
    link_bytes: Floats


def flows(pairs: Sequence[tuple[int, int, float]], width: float) -> Flows:
    """Transfers (source, target, bytes), all of one width; those from a server to itself and those of nothing are left out."""
    kept = [pair for pair in pairs if pair[0] != pair[1] and pair[2] > 0]
    source, target, size = (np.array([pair[k] for pair in kept]) for k in range(3))
    return Flows(source.astype(int), target.astype(int), size.astype(float), np.full(len(kept), width))


def complete(network: Network, wanted: Flows) -> FlowsDone:
    """Run `wanted` from the same moment, with max-min fair rates that are set anew whenever a flow ends."""
    if network.per_nic:
        wanted = _per_nic(wanted)
    paths = network.route(wanted.source, wanted.target)
    left, finish = wanted.size_bytes.copy(), np.zeros(len(wanted.source))
    carried, now = np.zeros(len(network.capacity)), 0.0
    open_ = np.arange(len(left))
    while len(open_):
        now_paths = _among(paths, open_)
        rates = max_min_rates(now_paths, wanted.width[open_], network.capacity)
        needs = left[open_] / rates
        ended = needs <= needs.min() + network.together * (now + needs.min())
        step = float(needs[ended].max())
        sent = np.minimum(left[open_], rates * step)
        sent[ended] = left[open_[ended]]
        carried += np.bincount(now_paths.links, sent[now_paths.flow_of], minlength=len(carried))
        left[open_] -= sent
        now += step
        finish[open_[ended]] = now
        open_ = open_[~ended]
    return FlowsDone(now, finish, carried)


def _per_nic(wanted: Flows) -> Flows:
    times = wanted.width.astype(int)
    size = np.repeat(wanted.size_bytes / times, times)
    return Flows(np.repeat(wanted.source, times), np.repeat(wanted.target, times), size, np.ones(len(size)))


def _among(paths: Paths, chosen: Ints) -> Paths:
    lengths = np.diff(paths.start)[chosen]
    start = np.concatenate([[0], np.cumsum(lengths)])
    offsets = np.arange(start[-1]) - np.repeat(start[:-1], lengths)
    return Paths(start, paths.links[np.repeat(paths.start[:-1][chosen], lengths) + offsets])


def paths_of(columns: Sequence[tuple[Ints, object]]) -> Paths:
    """Paths whose k-th hop is column k's link, for the flows on which that column's mask is true."""
    links = np.stack([link for link, _ in columns], axis=1)
    used = np.stack([np.broadcast_to(np.asarray(mask, bool), link.shape) for link, mask in columns], axis=1)
    start = np.concatenate([[0], np.cumsum(used.sum(axis=1))])
    return Paths(start, links[used])
