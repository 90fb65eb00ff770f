"""Owns the profile of each phase and the circuit template made from it, kept in the Store across restarts."""

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from itertools import chain, combinations

import msgspec

from rubato.actors.fabric.rhythm import Rhythm
from rubato.actors.fabric.section import BASELINES, FabricSection
from rubato.planning.demand import Demand, Flows, Links, flows, per_link
from rubato.planning.multihop import LinearProgram, bottleneck, multi_hop, one_hop
from rubato.planning.pods import plan_pods
from rubato.planning.switching import PhaseCost, Schedule, schedule
from rubato.planning.topology import Planner, direct, template
from rubato.runtime.errors import ConfigError
from rubato.runtime.importer import load_configured
from rubato.runtime.store.store import Fence, Store

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
    others, the trickle is what two without a link have instead, as a share of one.
    """

    def __init__(self, section: FabricSection, endpoints: tuple[str, ...]) -> None:
        """For this switch; the racks of a test-bed don't forward. Raises ConfigError where the planner needs what is not installed."""
        self.book = TemplateCache(endpoints)
        self._planner = _planner(section)
        self._fixed, self._static = endpoints, section.static
        self._trickle = section.trickle_mbps / 1e3 / section.link_gbps if section.testbed else None
        self._ports_per_endpoint = section.ports_per_endpoint
        self._max_endpoints = section.ports // section.ports_per_endpoint
        self.dead: frozenset[int] = frozenset()
        """Ports that failed, since the switch last came back."""
        self._bytes: dict[tuple[str, str], float] = {}

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

    def links_for(self, traffic: Sequence[Demand]) -> Links | None:
        """For traffic that is no phase's; None where none of it is between endpoints of the fabric."""
        if self._static or not flows(traffic, self.book.endpoints):
            return None
        return template(traffic, self.book.endpoints, self._ports_per_endpoint, self.dead, self._planner)

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


def _planner(section: FabricSection) -> Planner:
    name = section.planner
    if name == "pods":
        pod_of = [at for rack in section.racks for at, pod in enumerate(section.pods.values()) if rack in pod]
        return lambda directed, ports: _by_pods(directed, ports, pod_of)
    if name == "multi_hop":
        if find_spec("scipy") is None:
            raise ConfigError("fabric.planner multi_hop needs SciPy. Install rubato-rl[fabric], or take another planner.")
        return lambda directed, ports: multi_hop(directed, ports, solve)
    choose_links: Callable[[Flows, Sequence[int]], Links] = (
        direct if name == "direct" else load_configured(BASELINES.get(name, name), key="fabric.planner")
    )
    return lambda directed, ports: choose_links(per_link(directed), ports)


def _by_pods(directed: Flows, ports: Sequence[int], pod_of: Sequence[int]) -> Links:
    """Every rack as if it had the fewest ports of all."""
    planned = plan_pods(directed, pod_of, min(ports))
    return tuple(sorted((*planned.pod, *planned.core)))


def choose(rhythm: Rhythm, templates: Templates, *, link_bytes_s: float, delay_s: float) -> dict[str, str]:
    """Phase → the phase whose template it should have, for the shortest period; empty before the first iteration is over.

    A phase is taken to wait for its traffic, and to go on for the rest of its usual time when that is through.
    """
    cycle = rhythm.cycle()
    names = sorted(phase for phase in cycle if phase in templates.book.phases)
    if not names:
        return {}
    costs: list[PhaseCost] = []
    for phase in cycle:
        busy_s = tuple(templates.bytes_per_link(phase, name) / link_bytes_s for name in names)
        costs.append(PhaseCost(0.0, busy_s, max(0.0, (rhythm.lasts(phase) or 0.0) - min(busy_s))))
    found: Schedule = schedule(costs, delay_s)
    return {phase: names[k] for phase, k in zip(cycle, found.choices, strict=True)}


def solve(program: LinearProgram) -> Sequence[float]:
    """An optimal x. Raises ValueError where there is none, and ImportError without SciPy."""
    import numpy as np
    from scipy.optimize import linprog
    from scipy.sparse import csr_matrix

    def matrix(entries: tuple[tuple[int, int, float], ...], num_rows: int) -> "csr_matrix":
        rows, columns, values = zip(*entries, strict=True)
        return csr_matrix((values, (rows, columns)), shape=(num_rows, program.num_variables))

    cost = np.zeros(program.num_variables)
    cost[0] = 1.0
    found = linprog(
        cost,
        A_ub=matrix(program.bounds, program.num_bounds),
        b_ub=np.zeros(program.num_bounds),
        A_eq=matrix(program.equations, len(program.equal_to)),
        b_eq=np.array(program.equal_to),
        method="highs",
    )
    if found.x is None:
        raise ValueError(f"the linear program has no solution: {found.message}")
    return found.x.tolist()
