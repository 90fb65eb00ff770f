"""Owns the profile of each phase and the circuit template made from it, kept in the Store across restarts."""

import msgspec

from planning.demand import Demand, Pair
from planning.topology import template
from runtime.store.store import Fence, Store

KEY = "fabric/templates"


class Profile(msgspec.Struct, frozen=True):
    """A phase as its first iteration showed it, and the links it gets."""

    traffic: tuple[Demand, ...]
    links: tuple[Pair, ...]


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

    async def load(self, store: Store) -> None:
        """Take up what an earlier incarnation kept. A record that does not fit this switch is dropped and profiled again."""
        value = await store.get(KEY)
        try:
            book = msgspec.msgpack.decode(value, type=Book) if value is not None else Book()
        except msgspec.MsgspecError:
            return
        if len(book.endpoints) <= self._max_endpoints:
            phases = {phase: self._profile(kept.traffic, book.endpoints) for phase, kept in book.phases.items()}
            self.book = Book(book.endpoints, phases)

    async def save(self, store: Store, fence: Fence) -> None:
        """Raises Fenced when a newer incarnation has taken over."""
        await store.write({KEY: msgspec.msgpack.encode(self.book)}, fence=fence)

    def links(self, phase: str) -> tuple[Pair, ...] | None:
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
        self.book = Book(tuple(endpoints), {p: self._profile(t, tuple(endpoints)) for p, t in seen.items()})
        return True

    def _profile(self, traffic: tuple[Demand, ...], endpoints: tuple[str, ...]) -> Profile:
        return Profile(traffic, template(traffic, endpoints, self._ports_per_endpoint))
