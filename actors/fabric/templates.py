"""Owns the profile of each phase and the circuit template made from it, kept in the Store across restarts."""

from collections.abc import Callable, Collection, Mapping, Sequence
from importlib.util import find_spec
from itertools import chain, combinations
from typing import NamedTuple

import msgspec

from rubato.actors.fabric.rhythm import Aim, Rhythm
from rubato.actors.fabric.section import BASELINES, FabricSection
from rubato.actors.messages.fabric import PhaseWindow, PhaseWindows
from rubato.planning.demand import Demand, Flows, Links, flows, per_link
from rubato.planning.multihop import LinearProgram, multi_hop
from rubato.planning.phase_time import LinkRates, Operation, run_s, template
from rubato.planning.pods import pod_links
from rubato.planning.switching import PhaseCost, Schedule, schedule
from rubato.planning.topology import Planner, direct
from rubato.planning.volumes import CHANGED, SMALL, Volumes, Way, demands, followed, strayed, volumes
from rubato.planning.windows import Window, WindowPlan, plan_windows
from rubato.runtime.errors import ConfigError
from rubato.runtime.importer import load_configured
from rubato.runtime.store.store import Fence, Store

KEY = "fabric/templates"

ALL = ""
"""Stands for all phases: one template for their traffic in turn."""

MOST_WINDOWS = 256
"""Of a phase: the schedule of as many takes some tens of milliseconds."""


class Profile(msgspec.Struct, frozen=True):
    """A round of a phase, and the links it gets."""

    told: tuple[Demand, ...]
    """By the actors that cause it: weights, and what ranks exchange."""
    counted: tuple[Demand, ...]
    """All that travels as messages, as decayed means."""
    links: Links

    @property
    def traffic(self) -> tuple[Demand, ...]:
        """All of it."""
        return (*self.told, *self.counted)


UNKNOWN = Profile((), (), ())


class TemplateCache(msgspec.Struct, frozen=True):
    """Everything that is kept. Endpoint i owns the switch's i-th block of ports; one that left, and gave it back, is empty."""

    endpoints: tuple[str, ...] = ()
    phases: dict[str, Profile] = {}


class Templates:
    """One template per phase, over all endpoints that are there; every one is renewed when an endpoint comes or goes.

    With `endpoints` there are no others. `static`: all phases have the same one, by their traffic together. Where no endpoint forwards for
    others, the trickle is what two without a link have instead, as a share of one.
    """

    def __init__(self, section: FabricSection, endpoints: tuple[str, ...]) -> None:
        """For this switch; the racks of a test-bed don't forward. Raises ConfigError where the planner needs what is not installed."""
        self.book = TemplateCache(endpoints)
        self._planner = _planner(section)
        self._fixed, self._static = endpoints, section.static
        trickle = section.trickle_mbps / 1e3 / section.link_gbps if section.testbed else None
        self.rates = LinkRates(section.link_gbps * 1e9 / 8, trickle=trickle)
        self._ports_per_endpoint = section.ports_per_endpoint
        self._max_endpoints = section.ports // section.ports_per_endpoint
        self.dead: frozenset[int] = frozenset()
        """Ports that failed, since the switch last came back."""
        self._planned: dict[str, Volumes] = {}
        """By phase, what its links were planned for."""
        self._heard: dict[str, set[Way]] = {}
        """By phase, the ways that were told of since it was last over."""
        self._busy_s: dict[tuple[str, str], float] = {}
        self._whole: Links | None = None

    async def load(self, store: Store) -> None:
        """Take up what an earlier incarnation kept. A record that does not fit this switch is dropped and profiled again."""
        value = await store.get(KEY)
        try:
            book = msgspec.msgpack.decode(value, type=TemplateCache) if value is not None else TemplateCache()
        except msgspec.MsgspecError:
            return
        if len(book.endpoints) <= self._max_endpoints and self._fixed in ((), book.endpoints):
            self._renew(book.endpoints, book.phases)

    async def save(self, store: Store, fence: Fence) -> None:
        """Raises Fenced when a newer incarnation has taken over."""
        await store.write({KEY: msgspec.msgpack.encode(self.book)}, fence=fence)

    def links(self, phase: str) -> Links | None:
        """The cached template; None for a phase that has shown no traffic yet, unless all phases have the same."""
        if self._static or phase == ALL:
            return self._all()
        profile = self.book.phases.get(phase)
        return profile.links if profile else None

    def links_for(self, traffic: Sequence[Demand]) -> Links | None:
        """For traffic that is no phase's; None where none of it is between endpoints of the fabric."""
        if self._static or not flows(traffic, self.book.endpoints):
            return None
        return self.for_turns([traffic], self.book.endpoints)

    def even(self) -> Links:
        """For what nothing is known of: the ports divided evenly among all pairs of endpoints."""
        pairs = tuple((a, b, 1) for a, b in combinations(filter(None, self.book.endpoints), 2))
        return self.for_turns([pairs], self.book.endpoints)

    # -- what a job shows -------------------------------------------------------------------------------------------

    def learn(self, phase: str, traffic: tuple[Demand, ...], *, whole: bool = False) -> bool:
        """Note what an actor tells of a phase, which takes the place of what was told; True when its template, or any, was made anew.

        Several may tell, so ways that are not told of stay as they are. Traffic that is the `whole` of a phase leaves no other.
        """
        now = volumes(traffic)
        if not now:
            return False
        profile = self.book.phases.get(phase, UNKNOWN)
        self._heard.setdefault(phase, set()).update(now)
        return self._note(phase, now if whole else volumes(profile.told) | now, volumes(profile.counted))

    def observe(self, phase: str, traffic: tuple[Demand, ...]) -> bool:
        """Note all messages of a phase that is over, for their means; True when its template, or any, was made anew.

        What was not told of this time fades too.
        """
        profile, now = self.book.phases.get(phase, UNKNOWN), volumes(traffic)
        least = SMALL * max((size for _, _, size in (*self._traffic(self.book.phases), *traffic)), default=0)
        counted = followed(volumes(profile.counted), {way: size for way, size in now.items() if size > least}, least)
        told, heard = volumes(profile.told), self._heard.pop(phase, set())
        quiet = {way: mean for way, mean in told.items() if way not in heard}
        return self._note(phase, {way: told[way] for way in told if way in heard} | followed(quiet, {}, least), counted)

    def leave(self, gone: Collection[str]) -> bool:
        """These endpoints give their ports back, to those that had none; True when there were any. Racks stay."""
        if self._fixed or not (left := set(gone).intersection(self.book.endpoints)):
            return False
        endpoints = ["" if name in left else name for name in self.book.endpoints]
        while endpoints and not endpoints[-1]:
            endpoints.pop()
        phases: dict[str, Profile] = {}
        for phase, profile in self.book.phases.items():
            told, counted = (tuple(d for d in way if not left & set(d[:2])) for way in (profile.told, profile.counted))
            if told or counted:
                phases[phase] = Profile(told, counted, ())
        self._renew(self._with_ports(endpoints, self._traffic(phases)), phases)
        return True

    def _note(self, phase: str, told: Volumes, counted: Volumes) -> bool:
        """Links are planned anew for a new endpoint, for all phases; for a new way; and where more than CHANGED of the bytes go another way."""
        others = {name: profile for name, profile in self.book.phases.items() if name != phase}
        profile = Profile(demands(told), demands(counted), self.book.phases.get(phase, UNKNOWN).links)
        if not profile.traffic:
            self._renew(self.book.endpoints, others, ())
            return False
        endpoints, now, planned = self._with_ports(self.book.endpoints, profile.traffic), volumes(profile.traffic), self._planned.get(phase)
        same = endpoints == self.book.endpoints
        fits = same and planned is not None and planned.keys() >= now.keys() and strayed(planned, now) <= CHANGED
        changed = () if fits else (phase,) if same else None
        self._renew(endpoints, others | {phase: profile}, changed)
        return not fits

    @staticmethod
    def _traffic(phases: Mapping[str, Profile]) -> tuple[Demand, ...]:
        return tuple(chain.from_iterable(profile.traffic for profile in phases.values()))

    def _with_ports(self, endpoints: Sequence[str], traffic: Sequence[Demand]) -> tuple[str, ...]:
        """These endpoints and those that are new, on the ports that are free, those with most bytes first."""
        found = list(endpoints)
        for source, target, _ in sorted(traffic, key=lambda each: -each[2]):
            for name in (source, target):
                if self._fixed or name in found:
                    continue
                if "" in found:
                    found[found.index("")] = name
                elif len(found) < self._max_endpoints:
                    found.append(name)
        return tuple(found)

    def without(self, dead: frozenset[int]) -> None:
        """Leave out these ports of the switch, and no others. Raises ValueError where the rest can't connect the endpoints; nothing changes then."""
        before, self.dead = self.dead, dead
        try:
            self._renew(self.book.endpoints, self.book.phases)
        except ValueError:
            self.dead = before
            raise

    def ends_with_traffic(self, phase: str) -> bool:
        """Between racks: weights, and what ranks exchange, take their phase to its very end, which is when they have arrived."""
        return bool(self._fixed and self.book.phases.get(phase, UNKNOWN).told)

    def busy_s(self, phase: str, template_of: str) -> float:
        """What the traffic of `phase` is predicted to take over the links of another phase's template, or of that for all of them."""
        key = phase, template_of
        if key not in self._busy_s:
            profile, links = self.book.phases.get(phase), self.links(template_of)
            self._busy_s[key] = self.turn_s(profile.traffic, links) if profile and links else 0.0
        return self._busy_s[key]

    def turn_s(self, traffic: Sequence[Demand], links: Links) -> float:
        """What traffic is predicted to take over these links."""
        return run_s(Operation(flows(traffic, self.book.endpoints)), links, len(self.book.endpoints), self.rates)

    def for_turns(self, turns: Sequence[Sequence[Demand]], endpoints: Sequence[str]) -> Links:
        """The links with which traffic that takes turns is predicted to be through soonest, over the endpoints that are there.

        Ports that were given back have no links.
        """
        size, there = self._ports_per_endpoint, [at for at, name in enumerate(endpoints) if name]
        if len(there) < 2:
            return ()
        dead = [k * size + port % size for k, at in enumerate(there) for port in self.dead if port // size == at]
        links = template(turns, [endpoints[at] for at in there], size, dead, self._planner, self.rates)
        return tuple(sorted((there[a], there[b]) for a, b in links))

    def _all(self) -> Links | None:
        if self._whole is None and self.book.phases:
            self._whole = self.for_turns([profile.traffic for profile in self.book.phases.values()], self.book.endpoints)
        return self._whole

    def _renew(self, endpoints: tuple[str, ...], phases: Mapping[str, Profile], changed: Collection[str] | None = None) -> None:
        """Plan the links of the phases that `changed`, or of all."""
        renewed = dict(phases)
        planned = {} if changed is None else {phase: self._planned[phase] for phase in phases if phase in self._planned}
        for phase in phases if changed is None else changed:
            links = self.for_turns([phases[phase].traffic], endpoints)
            renewed[phase] = msgspec.structs.replace(phases[phase], links=links)
            planned[phase] = volumes(phases[phase].traffic)
        self.book, self._planned = TemplateCache(endpoints, renewed), planned
        self._busy_s.clear()
        self._whole = None


class Planned(NamedTuple):
    """What a plan was made for, and the plan."""

    given: tuple[object, ...]
    candidates: tuple[Links, ...]
    plan: WindowPlan


class Windows:
    """Circuits for the windows of each phase, as an actor announced it last: the exact schedule says between which of them circuits change."""

    def __init__(self, templates: Templates) -> None:
        self._templates = templates
        self._told: dict[str, tuple[PhaseWindow, ...]] = {}
        self._planned: dict[str, Planned] = {}

    def note(self, message: PhaseWindows, racks: Callable[[str, tuple[Demand, ...]], tuple[Demand, ...]]) -> bool:
        """Take them up, with traffic between racks; True when the templates changed. Raises ValueError for more than are worked on."""
        if len(message.windows) > MOST_WINDOWS:
            raise ValueError(f"{message.phase} was announced with {len(message.windows)} windows; at most {MOST_WINDOWS} are scheduled")
        told = (PhaseWindow(each.name, each.lasts_s, racks(message.phase, each.traffic)) for each in message.windows)
        self._told[message.phase] = tuple(told)
        together: dict[tuple[str, str], int] = {}
        for source, target, size_bytes in (way for each in self._told[message.phase] for way in each.traffic):
            together[source, target] = together.get((source, target), 0) + size_bytes
        return self._templates.learn(message.phase, tuple((*way, size_bytes) for way, size_bytes in together.items()), whole=True)

    def first(self, phase: str, delay_s: float) -> Links | None:
        """The circuits with which the phase begins; None where it has no windows."""
        planned = self._plan(phase, delay_s)
        return planned.candidates[planned.plan.choices[0]] if planned else None

    def aims(self, phase: str, began: float, delay_s: float) -> list[Aim]:
        """The changes within the phase that began at the loop time `began`."""
        planned = self._plan(phase, delay_s)
        changes = planned.plan.changes if planned else ()
        return [Aim(phase, began + c.due_s, began + c.starts_s, restore=True, links=c.links, window=True) for c in changes]

    def _plan(self, phase: str, delay_s: float) -> Planned | None:
        """Candidates are the circuits planned for the windows of each name, and those for all of them in turn."""
        told, templates = self._told.get(phase, ()), self._templates
        if not any(each.traffic for each in told):
            return None
        endpoints = templates.book.endpoints
        given, before = (told, endpoints, templates.dead, delay_s), self._planned.get(phase)
        if before is None or before.given != given:
            by_name: dict[str, list[Demand]] = {}
            for each in told:
                by_name.setdefault(each.name, []).extend(each.traffic)
            turns = [tuple(traffic) for traffic in by_name.values() if traffic]
            candidates = tuple(dict.fromkeys(templates.for_turns(some, endpoints) for some in (turns, *([turn] for turn in turns))))
            windows = [Window((Operation(flows(each.traffic, endpoints)),), each.lasts_s) for each in told]
            before = Planned(given, candidates, plan_windows(windows, candidates, len(endpoints), templates.rates, delay_s))
            self._planned[phase] = before
        return before


def _planner(section: FabricSection) -> Planner:
    name = section.planner
    if name == "pods":
        pod_of = [at for rack in section.racks for at, pod in enumerate(section.pods.values()) if rack in pod]
        return lambda directed, ports: pod_links(directed, ports, pod_of)
    if name == "multi_hop":
        if find_spec("scipy") is None:
            raise ConfigError("fabric.planner multi_hop needs SciPy. Install rubato-rl[fabric], or take another planner.")
        return lambda directed, ports: multi_hop(directed, ports, solve)
    choose_links: Callable[[Flows, Sequence[int]], Links] = (
        direct if name == "direct" else load_configured(BASELINES.get(name, name), key="fabric.planner")
    )
    return lambda directed, ports: choose_links(per_link(directed), ports)


def choose(rhythm: Rhythm, templates: Templates, *, delay_s: float) -> dict[str, str]:
    """Phase → the phase whose template it should have, or `ALL`, for the shortest period; empty before the first iteration is over.

    A phase is taken to wait for its traffic, and to go on for the rest of its usual time when that is through; one that ends with its traffic
    has that time before it, and no change can hide in it.
    """
    cycle = rhythm.cycle()
    names = sorted(phase for phase in cycle if phase in templates.book.phases)
    if not names:
        return {}
    names.append(ALL)
    costs: list[PhaseCost] = []
    for phase in cycle:
        busy_s = tuple(templates.busy_s(phase, name) for name in names)
        rest_s = max(0.0, (rhythm.lasts(phase) or 0.0) - min(busy_s))
        if templates.ends_with_traffic(phase):
            costs.append(PhaseCost(0.0, tuple(rest_s + each for each in busy_s)))
        else:
            costs.append(PhaseCost(0.0, busy_s, rest_s))
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
