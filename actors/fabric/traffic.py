"""Bytes between a job's actors in a phase: counted where they were sent, and by the racks between which they travel."""

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from urllib.parse import urlsplit

from rubato.bus.address import bare
from rubato.bus.errors import AskFailed
from rubato.planning.demand import Demand
from rubato.planning.relay import demands, pod_of
from rubato.planning.volumes import Way
from rubato.runtime.actor import Actor
from rubato.runtime.messages import BytesCounted, CountBytes
from rubato.runtime.registry import ActorRecord, role_of

COUNT_S = 1.0
"""For the answers of all actors: a phase that is over is counted while the next one runs."""

LEFT_OUT = frozenset({"node", "fabric_controller", "optical_switch"})
"""Roles that are not counted: what node agents carry are weights, of which the trainer tells, and the others are the fabric's own."""


class Racks:
    """Which rack sends bytes to which other one. Without racks every actor is an endpoint of its own, and nothing is translated."""

    def __init__(
        self,
        racks: Mapping[str, Collection[str]],
        find: Callable[[str], ActorRecord | None],
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


class Meter:
    """What the job's actors sent each other in a phase."""

    def __init__(self, actor: Actor) -> None:
        self._actor = actor
        self._before: Mapping[str, BytesCounted] | None = None
        """As last read; None before the first time."""
        self._counting = asyncio.Lock()
        self._missed = False
        """A phase ended while another one was counted: what is counted next is of several."""

    async def since(self) -> tuple[Demand, ...] | None:
        """Bytes between actors since the last call; None where that is not known, as at the first."""
        if self._counting.locked():
            self._missed = True
            return None
        async with self._counting:
            missed, self._missed, before = self._missed, False, self._before
            now = await self._read()
            silent = {name: counted for name, counted in (before or {}).items() if name not in now and self._actor.directory.find(name)}
            self._before = now | silent
        if before is None or missed:
            return None
        found: Counter[Way] = Counter()
        for name, counted in now.items():
            earlier = before.get(name)
            if earlier is None or earlier.incarnation != counted.incarnation:
                earlier = BytesCounted(counted.incarnation, {}, {})
            found.update(
                {(name, other): size - earlier.sent.get(other, 0) for other, size in counted.sent.items() if other in self._before}
            )
            found.update(
                {(other, name): size - earlier.came.get(other, 0) for other, size in counted.came.items() if other in self._before}
            )
        return tuple((*way, size) for way, size in sorted(found.items()) if size > 0)

    async def _read(self) -> dict[str, BytesCounted]:
        """Of those that answer in time."""

        async def one(name: str) -> BytesCounted | None:
            try:
                return await self._actor.ref(name).ask(CountBytes(), timeout=COUNT_S, retry=False)
            except AskFailed:
                return None

        names = [name for name in sorted(self._actor.directory.names()) if role_of(name) not in LEFT_OUT]
        read = await asyncio.gather(*map(one, names))
        return {name: counted for name, counted in zip(names, read, strict=True) if counted is not None}
