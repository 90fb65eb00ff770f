"""Owns the profile of each phase and the circuit template made from it, kept in the Store across restarts."""

from importlib.util import find_spec
from itertools import chain, combinations
from typing import Self

import msgspec

from actors.fabric.linear import solve
from actors.fabric.section import FabricSection
from planning.baselines import greedy, matching
from planning.demand import Demand, Links, flows, per_link
from planning.multihop import bottleneck, multi_hop, one_hop
from planning.topology import Planner, direct, template
from runtime.errors import ConfigError
from runtime.store.store import Fence, Store

KEY = "fabric/templates"


class Profile(msgspec.Struct, frozen=True):
    """A phase as its first iteration showed it, and the links it gets."""

    traffic: tuple[Demand, ...]
    links: Links


class TemplateCache(msgspec.Struct, frozen=True):
    """Everything that is kept. Endpoint i owns the switch's i-th block of ports."""

    endpoints: tuple[str, ...] = ()
    phases: dict[str, Profile] = {}


class Templates:
    """One template per phase, over all endpoints seen so far; every one is renewed when an endpoint is new.

    With `endpoints` there are no others. `static`: all phases have the same one, by their traffic together. Where no endpoint forwards for
    others, `trickle` is what two without a link have instead, as a share of one.
    """

    def __init__(
        self,
        max_endpoints: int,
        ports_per_endpoint: int,
        endpoints: tuple[str, ...] = (),
        *,
        static: bool = False,
        trickle: float | None = None,
        planner: Planner | None = None,
    ) -> None:
        self.book = TemplateCache(endpoints)
        self._planner = planner
        self._fixed, self._static, self._trickle = endpoints, static, trickle
        self._max_endpoints = max_endpoints
        self._ports_per_endpoint = ports_per_endpoint
        self.dead: frozenset[int] = frozenset()
        """Ports that failed, since the switch last came back."""
        self._bytes: dict[tuple[str, str], float] = {}

    @classmethod
    def of(cls, section: FabricSection, endpoints: tuple[str, ...]) -> Self:
        """For this switch; the racks of a test-bed don't forward. Raises ConfigError where the planner needs what is not installed."""
        ports = section.ports_per_endpoint
        trickle = section.trickle_mbps / 1e3 / section.link_gbps if section.testbed else None
        return cls(
            section.ports // ports,
            ports,
            endpoints,
            static=section.static,
            trickle=trickle,
            planner=_planner(section.planner),
        )

    async def load(self, store: Store) -> None:
        """Take up what an earlier incarnation kept. A record that does not fit this switch is dropped and profiled again."""
        value = await store.get(KEY)
        try:
            book = msgspec.msgpack.decode(value, type=TemplateCache) if value is not None else TemplateCache()
        except msgspec.MsgspecError:
            return
        if len(book.endpoints) <= self._max_endpoints and self._fixed in ((), book.endpoints):
            self._renew(book.endpoints, {phase: kept.traffic for phase, kept in book.phases.items()})

    async def save(self, store: Store, fence: Fence) -> None:
        """Raises Fenced when a newer incarnation has taken over."""
        await store.write({KEY: msgspec.msgpack.encode(self.book)}, fence=fence)

    def links(self, phase: str) -> Links | None:
        """The cached template; None for a phase that has shown no traffic yet, unless all phases have the same."""
        if self._static:
            return next((profile.links for profile in self.book.phases.values()), None)
        profile = self.book.phases.get(phase)
        return profile.links if profile else None

    def even(self) -> Links:
        """For what nothing is known of: the ports divided evenly among all pairs of endpoints."""
        pairs = tuple((a, b, 1) for a, b in combinations(self.book.endpoints, 2))
        return template(pairs, self.book.endpoints, self._ports_per_endpoint, self.dead, self._planner)

    def learn(self, phase: str, traffic: tuple[Demand, ...], *, whole: bool = False) -> bool:
        """Profile a phase from the first traffic it shows, or that a new endpoint shows; True when the book changed.

        Who sends what in a phase is told by several: pairs that are new to it are added. Traffic that is the `whole` of a phase takes the
        place of what was known, where its pairs are others.
        """
        endpoints = list(self.book.endpoints)
        for name in (name for source, target, _ in traffic for name in (source, target)):
            if name not in endpoints and len(endpoints) < self._max_endpoints and not self._fixed:
                endpoints.append(name)
        grown = len(endpoints) > len(self.book.endpoints)
        known = self.book.phases[phase].traffic if phase in self.book.phases and not grown else ()
        pairs = {each[:2] for each in known}
        new = tuple(each for each in traffic if each[:2] not in pairs)
        if not traffic or (not new and not (whole and len(traffic) < len(known))):
            return False
        seen = {p: f.traffic for p, f in self.book.phases.items()} | {phase: traffic if whole else known + new}
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
        if template_of not in self.book.phases:
            return 0.0
        if key not in self._bytes:
            traffic = self.book.phases[phase].traffic if phase in self.book.phases else ()
            directed = flows(traffic, self.book.endpoints)
            links = self.book.phases[template_of].links
            if self._trickle is None:
                self._bytes[key] = bottleneck(directed, links, len(self.book.endpoints))
            else:
                self._bytes[key] = one_hop(directed, links, self._trickle)
        return self._bytes[key]

    def _renew(self, endpoints: tuple[str, ...], traffic: dict[str, tuple[Demand, ...]]) -> None:
        ports = self._ports_per_endpoint
        together = tuple(chain.from_iterable(traffic.values()))
        phases = {
            phase: Profile(t, template(together if self._static else t, endpoints, ports, self.dead, self._planner))
            for phase, t in traffic.items()
        }
        self.book = TemplateCache(endpoints, phases)
        self._bytes.clear()


def _planner(name: str) -> Planner:
    if name == "multi_hop":
        if find_spec("scipy") is None:
            raise ConfigError(
                "fabric.planner multi_hop needs SciPy. Install rubato-rl[fabric], or take another planner."
            )
        return lambda directed, ports: multi_hop(directed, ports, solve)
    choose = {"direct": direct, "greedy": greedy, "matching": matching}[name]
    return lambda directed, ports: choose(per_link(directed), ports)
