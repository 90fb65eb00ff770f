"""Owns the profile of each phase and the circuit template made from it, kept in the Store across restarts."""

import msgspec

from planning.demand import Demand, Links, flows
from planning.multihop import bottleneck
from planning.topology import template
from runtime.store.store import Fence, Store

KEY = "fabric/templates"


class Profile(msgspec.Struct, frozen=True):
    """A phase as its first iteration showed it, and the links it gets."""

    traffic: tuple[Demand, ...]
    links: Links


class Book(msgspec.Struct, frozen=True):
    """Everything that is kept. Endpoint i owns the switch's i-th block of ports."""

    endpoints: tuple[str, ...] = ()
    phases: dict[str, Profile] = {}


class Templates:
    """One template per phase, over all endpoints seen so far; every one is renewed when an endpoint is new."""

    def __init__(self, max_endpoints: int, ports_per_endpoint: int) -> None:
        self.book = Book()
        self._max_endpoints = max_endpoints
        self._ports_per_endpoint = ports_per_endpoint
        self.dead: frozenset[int] = frozenset()
        """Ports that failed, since the switch last came back."""
        self._bytes: dict[tuple[str, str], float] = {}

    async def load(self, store: Store) -> None:
        """Take up what an earlier incarnation kept. A record that does not fit this switch is dropped and profiled again."""
        value = await store.get(KEY)
        try:
            book = msgspec.msgpack.decode(value, type=Book) if value is not None else Book()
        except msgspec.MsgspecError:
            return
        if len(book.endpoints) <= self._max_endpoints:
            self._renew(book.endpoints, {phase: kept.traffic for phase, kept in book.phases.items()})

    async def save(self, store: Store, fence: Fence) -> None:
        """Raises Fenced when a newer incarnation has taken over."""
        await store.write({KEY: msgspec.msgpack.encode(self.book)}, fence=fence)

    def links(self, phase: str) -> Links | None:
        """The cached template; None for a phase that has shown no traffic yet."""
        profile = self.book.phases.get(phase)
        return profile.links if profile else None

    def learn(self, phase: str, traffic: tuple[Demand, ...]) -> bool:
        """Profile a phase from the first traffic it shows, or that a new endpoint shows; True when the book changed."""
        endpoints = list(self.book.endpoints)
        for name in (name for source, target, _ in traffic for name in (source, target)):
            if name not in endpoints and len(endpoints) < self._max_endpoints:
                endpoints.append(name)
        grown = len(endpoints) > len(self.book.endpoints)
        if not traffic or (phase in self.book.phases and not grown):
            return False
        seen = {p: f.traffic for p, f in self.book.phases.items()} | {phase: traffic}
        self._renew(tuple(endpoints), seen)
        return True

    def without(self, dead: frozenset[int]) -> None:
        """Leave out these ports of the switch, and no others. Raises ValueError where the rest can't connect the endpoints; nothing changes then."""
        before, self.dead = self.dead, dead
        try:
            self._renew(self.book.endpoints, {phase: kept.traffic for phase, kept in self.book.phases.items()})
        except ValueError:
            self.dead = before
            raise

    def bytes_per_link(self, phase: str, template_of: str) -> float:
        """What the fullest link carries when `phase` runs over the links of another phase's template."""
        key = phase, template_of
        if key not in self._bytes:
            traffic = self.book.phases[phase].traffic if phase in self.book.phases else ()
            directed = flows(traffic, self.book.endpoints)
            self._bytes[key] = bottleneck(directed, self.book.phases[template_of].links, len(self.book.endpoints))
        return self._bytes[key]

    def _renew(self, endpoints: tuple[str, ...], traffic: dict[str, tuple[Demand, ...]]) -> None:
        ports = self._ports_per_endpoint
        phases = {phase: Profile(t, template(t, endpoints, ports, self.dead)) for phase, t in traffic.items()}
        self.book = Book(endpoints, phases)
        self._bytes.clear()
