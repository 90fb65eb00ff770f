"""Where actors are on the fabric: the phases' bytes between actors become bytes between racks, as far as they leave a rack."""

from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from bus.address import bare
from planning.demand import Demand
from planning.relay import demands

if TYPE_CHECKING:
    from runtime.registry import ActorRecord


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
        """What each rack sends each other one. Weights reach each host once, from the host that it pulls from."""
        if not self.names:
            return tuple(each for each in actors if each[2] > 0)
        found: dict[tuple[str, str], int] = {}
        for source, target, size_bytes in self._pulled(actors) if phase == "weight_sync" else actors:
            here, there = self._rack(source), self._rack(target)
            if here and there and here != there and size_bytes > 0:
                found[here, there] = found.get((here, there), 0) + size_bytes
        return tuple((*pair, size_bytes) for pair, size_bytes in found.items())

    def _pulled(self, actors: tuple[Demand, ...]) -> tuple[Demand, ...]:
        """The hops between node agents by which the hosts of the engines come to what one trainer publishes."""
        home = next((node for source, _, _ in actors if (node := self._node(source))), "")
        hosts = {node for _, target, _ in actors if (node := self._node(target))} & set(self._peers("node"))
        size_bytes = max((size for _, _, size in actors), default=0)
        return demands(home, hosts, size_bytes, by_rings=self._by_rings) if home else ()

    def _node(self, actor: str) -> str:
        record = self._find(actor)
        return record.node if record is not None else ""

    def _rack(self, actor: str) -> str:
        """Empty for an actor that is gone, or on a host that is in no rack."""
        record = self._find(actor)
        return self._rack_of.get(urlsplit(record.public).hostname or "", "") if record is not None else ""
