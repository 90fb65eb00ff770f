"""Where bytes between actors go on the fabric: which rack sends them to which other one."""

from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from rubato.bus.address import bare
from rubato.planning.demand import Demand
from rubato.planning.relay import demands, pod_of

if TYPE_CHECKING:
    from rubato.runtime.registry import ActorRecord


class Racks:
    """Without racks every actor is an endpoint of its own, and nothing is translated."""

    def __init__(
        self,
        racks: Mapping[str, Collection[str]],
        find: "Callable[[str], ActorRecord | None]",
        peers: Callable[[str], tuple[str, ...]],
        *,
        by_rings: bool,
    ) -> None:
        self.names = tuple(racks)
        self._rack_of = {bare(address): rack for rack, addresses in racks.items() for address in addresses}
        self._find, self._peers = find, peers
        self._by_rings = by_rings

    def traffic(self, phase: str, actors: tuple[Demand, ...]) -> tuple[Demand, ...]:
        """What is told of a phase, as `between`. Weights reach each host once, from the host that it pulls from."""
        return self.between(self._pulled(actors) if self.names and phase == "weight_sync" else actors)

    def between(self, actors: tuple[Demand, ...]) -> tuple[Demand, ...]:
        """What each rack sends each other one."""
        if not self.names:
            return tuple(each for each in actors if each[2] > 0)
        found: dict[tuple[str, str], int] = {}
        for source, target, size_bytes in actors:
            here, there = self._rack(source), self._rack(target)
            if here and there and here != there and size_bytes > 0:
                found[here, there] = found.get((here, there), 0) + size_bytes
        return tuple((*pair, size_bytes) for pair, size_bytes in found.items())

    def _pulled(self, actors: tuple[Demand, ...]) -> tuple[Demand, ...]:
        """The hops between node agents by which the hosts of the engines come to what a trainer publishes, or several of its ranks."""
        sizes: dict[str, dict[str, int]] = {}
        for source, target, size_bytes in actors:
            home, host = self._node(source), self._node(target)
            if home and host and host != home:
                sizes.setdefault(home, {})[host] = size_bytes
        found: list[Demand] = []
        for home, of_hosts in sizes.items():
            hosts = of_hosts.keys() & set(self._peers("node"))
            pods = {host: pod_of(record.provides) for host in hosts | {home} if (record := self._find(host)) is not None}
            found += demands(home, hosts, max(of_hosts.values()), by_rings=self._by_rings, pods=pods)
        return tuple(found)

    def _node(self, actor: str) -> str:
        record = self._find(actor)
        return record.node if record is not None else ""

    def _rack(self, actor: str) -> str:
        """Empty for an actor that is gone, or on a host that is in no rack."""
        record = self._find(actor)
        return self._rack_of.get(urlsplit(record.public).hostname or "", "") if record is not None else ""
