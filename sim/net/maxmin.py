"""Max-min fair rates of flows that share links: the bandwidth that lossless, well-controlled transports settle on.

Two implementations of one definition: numpy, fast while few rates are distinct, and numba (extra `sim`), fast always.
"""

import heapq
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

NUMBA_FROM = 20_000
"""Flows from which compiling (seconds, once per machine) pays."""

SAME = 1e-12
"""Links whose fair shares differ by less, relatively, are filled together."""


class Paths(NamedTuple):
    """The links of flow i are `links[start[i]:start[i + 1]]`, each at most once."""

    start: Ints
    links: Ints

    @property
    def flow_of(self) -> Ints:
        """The flow of each entry of `links`."""
        return np.repeat(np.arange(len(self.start) - 1), np.diff(self.start))


def max_min_rates(paths: Paths, width: Floats, capacity: Floats, *, compiled: bool | None = None) -> Floats:
    """Rate of each flow, in the unit of `capacity`; a flow of width w gets w shares. A flow without links gets infinity.

    The least served flows get as much as can be, then the next: every flow has a full link on which none is served better per share.
    `compiled` forces numba (True) or numpy (False); by default numba is used where it is installed and pays.
    """
    if compiled is None:
        compiled = len(width) >= NUMBA_FROM and _has_numba()
    fill = _compiled() if compiled else _rounds
    return fill(paths.start, paths.links, width.astype(float), capacity.astype(float))


def _rounds(start: Ints, links: Ints, width: Floats, capacity: Floats) -> Floats:
    """All links with the least fair share at once, then again among the flows that are left."""
    flow_of = Paths(start, links).flow_of
    shares = np.full(len(width), np.inf)
    left = capacity.copy()
    open_ = np.ones(len(links), bool)
    while open_.any():
        load = np.bincount(links[open_], width[flow_of[open_]], minlength=len(capacity))
        share = np.where(load > 0, np.maximum(left, 0) / np.where(load > 0, load, 1), np.inf)
        least = share.min()
        full = share <= least * (1 + SAME)
        done = np.unique(flow_of[open_ & full[links]])
        shares[done] = least
        ended = np.zeros(len(width), bool)
        ended[done] = True
        closing = open_ & ended[flow_of]
        left -= np.bincount(links[closing], width[flow_of[closing]] * least, minlength=len(capacity))
        open_ &= ~closing
    return shares * width


def _heap_fill(start: Any, links: Any, width: Any, capacity: Any) -> Any:
    """One link after another, least fair share first. Shares only grow as flows end, so an entry of the heap is a lower bound."""
    num_flows, num_links = len(width), len(capacity)
    load = np.zeros(num_links)
    count = np.zeros(num_links + 1, np.int64)
    for flow in range(num_flows):
        for i in range(start[flow], start[flow + 1]):
            load[links[i]] += width[flow]
            count[links[i] + 1] += 1
    first = np.cumsum(count)
    at = first[:-1].copy()
    flows = np.empty(len(links), np.int64)
    for flow in range(num_flows):
        for i in range(start[flow], start[flow + 1]):
            flows[at[links[i]]] = flow
            at[links[i]] += 1
    left = capacity.copy()
    shares = np.full(num_flows, np.inf)
    open_flows = count[1:].copy()
    heap = [(left[link] / load[link], link) for link in range(num_links) if load[link] > 0]
    heapq.heapify(heap)
    while len(heap) > 0:
        share, link = heapq.heappop(heap)
        if open_flows[link] == 0:
            continue
        now = max(left[link], 0.0) / load[link]
        if now > share * (1 + 1e-13):
            heapq.heappush(heap, (now, link))
            continue
        for k in range(first[link], first[link + 1]):
            flow = flows[k]
            if shares[flow] != np.inf:
                continue
            shares[flow] = share
            for i in range(start[flow], start[flow + 1]):
                other = links[i]
                left[other] -= width[flow] * share
                load[other] -= width[flow]
                open_flows[other] -= 1
    return shares * width


@cache
def _compiled() -> Callable[..., Floats]:
    """`_heap_fill` in machine code, kept on disk. Raises ImportError without numba."""
    import numba

    return numba.njit(cache=True)(_heap_fill)


@cache
def _has_numba() -> bool:
    from importlib.util import find_spec

    return find_spec("numba") is not None
