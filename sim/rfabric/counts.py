"""How many ports, transceivers and switches a fabric takes: the bill of materials of Figure 7 of the RFabric paper."""

from collections.abc import Callable, Mapping
from math import ceil
from typing import Final, NamedTuple

from rubato.sim.hardware import Prices


class FabricSize(NamedTuple):
    """What every fabric is counted for: one NIC per GPU, optics at both ends of every link."""

    gpus: int
    radix: int
    """Ports of an electrical switch."""
    oversubscription: int = 3
    """Of the oversubscribed fat-tree, at the leaf."""
    core_share: float = 0.5
    """RFabric: uplinks from a PoD's optical layer into the core, per ToR uplink."""
    ocs_radix: int = 320
    gpus_per_server: int = 8


class FabricParts(NamedTuple):
    """A fabric's bill of materials."""

    eps_ports: float
    transceivers: float
    ocs_ports: float
    tiers: int

    def usd(self, prices: Prices) -> float:
        """What it costs."""
        return self.eps_ports * prices.eps_port + self.transceivers * prices.transceiver + self.ocs_ports * prices.ocs_port


def clos(gpus: int, radix: int, oversubscription: int = 1) -> FabricParts:
    """A folded Clos whose leaves have `oversubscription` times as many ports down as up; full above the leaf."""
    tiers = clos_tiers(gpus, radix, oversubscription)
    up = gpus / oversubscription
    above = up if tiers == 2 else 3 * up
    return FabricParts(gpus + up + above, 2 * gpus + (2 if tiers == 2 else 4) * up, 0, tiers)


def clos_tiers(gpus: int, radix: int, oversubscription: int = 1) -> int:
    """2 while a spine switch reaches every leaf, else 3; more than a three-tier tree can hold raises ValueError."""
    down = radix * oversubscription // (oversubscription + 1)
    if gpus <= radix * down:
        return 2
    if gpus > radix * radix // 2 * down:
        raise ValueError(f"{gpus} GPUs exceed a three-tier tree of {radix}-port switches ({radix * radix // 2 * down})")
    return 3


def superpod(gpus: int, radix: int) -> tuple[int, ...]:
    """Switches per tier of a non-blocking fat-tree, from the leaf up."""
    leaves = ceil(2 * gpus / radix)
    return (leaves, leaves // 2) if clos_tiers(gpus, radix) == 2 else (leaves, leaves, leaves // 2)


def sip(sizes: FabricSize) -> FabricParts:
    """A flat optical patch panel: each NIC's fibre ends on a circuit switch, one stage while all servers fit, else a Clos of three."""
    stages = 1 if sizes.gpus / sizes.gpus_per_server <= sizes.ocs_radix else 3
    return FabricParts(0, sizes.gpus, stages * sizes.gpus, stages)


def rfabric(sizes: FabricSize) -> FabricParts:
    """Electrical ToR, half its ports up; optical aggregation; an optical core that `core_share` of the uplinks reach."""
    n, c = sizes.gpus, sizes.core_share
    return FabricParts(2 * n, 3 * n, (1 + 2 * c) * n, 3)


FABRICS: Final[Mapping[str, Callable[[FabricSize], FabricParts]]] = {
    "fat-tree": lambda s: clos(s.gpus, s.radix),
    "rail-optimised": lambda s: clos(s.gpus, s.radix),
    "oversubscribed": lambda s: clos(s.gpus, s.radix, s.oversubscription),
    "sip": sip,
    "rfabric": rfabric,
    "rfabric-unweighted": rfabric,
}
"""By the name that scenarios use; a rail-optimised tree has a fat-tree's parts, wired otherwise, and RFabric has the same however it is planned."""
