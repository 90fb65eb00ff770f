"""Electrical trees of packet switches: fat-tree, oversubscribed, and rail-optimised.

Packets are sprayed evenly over equal paths, so all uplinks of a leaf act as one link; with `ecmp_seed` each flow is hashed
onto one uplink instead, as routers do with RDMA flows.
"""

from typing import NamedTuple

import numpy as np

from rubato.sim.net.maxmin import Ints, Paths
from rubato.sim.net.network import Network, paths_of


class ClosSpec(NamedTuple):
    """A tree of identical switches. Rates are bytes per second."""

    servers: int
    radix: int
    nic_bytes_s: float
    oversubscription: int = 1
    """Ports down per port up at the leaf; above it the tree is full."""
    rail_optimised: bool = False
    """NIC i of every server goes to leaf i of its group, so that NICs of one rank are one hop apart."""
    nics: int = 8
    """Per server."""
    lost: float = 0.0
    """Share of the spine planes that have failed."""
    ecmp_seed: int | None = None

    @property
    def down(self) -> int:
        """NICs per leaf."""
        return self.radix * self.oversubscription // (self.oversubscription + 1)

    @property
    def servers_per_leaf(self) -> int:
        """Servers whose traffic of one rank stays below a leaf."""
        return self.down if self.rail_optimised else max(1, self.down // self.nics)

    @property
    def leaves_per_pod(self) -> int:
        """Groups of leaves, where rail-optimised."""
        return max(1, self.radix // 2 // (self.nics if self.rail_optimised else 1))


def clos(spec: ClosSpec) -> Network:
    """Links: every server up and down, then every leaf (or uplink of one, with hashing) up and down, then every pod likewise."""
    per_leaf, nics = spec.servers_per_leaf, spec.nics
    leaves = -(-spec.servers // per_leaf)
    pods = -(-leaves // spec.leaves_per_pod)
    up = per_leaf * nics / spec.oversubscription * (1 - spec.lost)
    lanes = 1 if spec.ecmp_seed is None else round(up)
    if lanes < 1:
        raise ValueError(f"a leaf with {spec.lost:.0%} of its uplinks lost has none left to hash flows onto")
    sizes = (spec.servers, leaves * lanes, pods)
    rates = (nics, up / lanes, up * spec.leaves_per_pod)
    base = np.concatenate([[0], np.cumsum([2 * n for n in sizes])])
    capacity = np.concatenate([np.full(2 * n, rate * spec.nic_bytes_s) for n, rate in zip(sizes, rates, strict=True)])
    names = [f"{tier}{i} {way}" for tier, n in zip(TIERS, sizes, strict=True) for way in ("up", "down") for i in range(n)]

    def route(source: Ints, target: Ints) -> Paths:
        leaf, leaf_to = source // per_leaf, target // per_leaf
        pod, pod_to = leaf // spec.leaves_per_pod, leaf_to // spec.leaves_per_pod
        lane = np.zeros_like(source) if lanes == 1 else _hashed(source, target, lanes, spec.ecmp_seed or 0)
        moves, leaves_apart, pods_apart = source != target, leaf != leaf_to, pod != pod_to
        hops = (
            (base[0] + source, moves),
            (base[1] + leaf * lanes + lane, leaves_apart),
            (base[2] + pod, pods_apart),
            (base[2] + sizes[2] + pod_to, pods_apart),
            (base[1] + sizes[1] + leaf_to * lanes + lane, leaves_apart),
            (base[0] + sizes[0] + target, moves),
        )
        return paths_of(hops)

    return Network(names, capacity, route) if lanes == 1 else Network(names, capacity, route, True, HASHED_TOGETHER)


HASHED_TOGETHER = 2e-3
"""Hashed flows end one by one, some thousand of them: this keeps a run to some hundred solutions, at well under 1 % of its time."""

TIERS = ("server", "leaf", "pod")


def _hashed(source: Ints, target: Ints, lanes: int, seed: int) -> Ints:
    """An uplink per flow: two flows of the same servers differ by their place in the set, as their ports would."""
    mixed = (source * 0x9E3779B1 + target * 0x85EBCA77 + np.arange(len(source)) * 0xC2B2AE3D + seed * 0x27D4EB2F) % 2**32
    mixed ^= mixed >> 15
    mixed = (mixed * 0x2C1B3C6D) % 2**32
    mixed ^= mixed >> 12
    return (mixed % lanes).astype(np.int64)
