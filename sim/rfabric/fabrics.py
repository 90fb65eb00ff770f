"""The fabrics under comparison: each turns a job's traffic into the time of its phases."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from math import inf
from typing import Annotated, Final, NamedTuple

from pydantic import Field

from rubato.planning.demand import Links, per_link
from rubato.planning.phase_time import SHARES, LinkRates, choose_links, phase_s, run_s
from rubato.planning.pods import pod_links
from rubato.planning.switching import PhaseCost, schedule
from rubato.planning.topology import Planner, direct
from rubato.planning.windows import Window, WindowPlan, plan_windows
from rubato.runtime.config import Section
from rubato.sim.net.clos import ClosSpec, clos
from rubato.sim.net.direct import DirectSpec, direct_network
from rubato.sim.net.network import Network
from rubato.sim.rfabric import windows
from rubato.sim.rfabric.iteration import PhaseTime, Traffic, phase_time, planned, traffic
from rubato.sim.rfabric.job import PHASES, FabricJob, Phase, compute_s

ALL = "all"
"""Names the topology planned for the whole iteration."""

BY_WINDOWS = "by windows"
"""Stands for topologies that change within the execution."""


class DelaySpec(Section):
    """What a change of circuits takes, part by part, in seconds. They follow each other."""

    drain_s: float = Field(default=0.0, ge=0)
    control_s: float = Field(default=0.0, ge=0)
    """Request and answer, over all switches."""
    ocs_s: float = Field(default=0.010, ge=0)
    """Mirrors; 3D MEMS by default (RFabric, Table 2)."""
    relink_s: float = Field(default=0.0, ge=0)
    """Until transceivers and network cards carry packets again: milliseconds to seconds."""

    @property
    def total_s(self) -> float:
        return self.drain_s + self.control_s + self.ocs_s + self.relink_s


class FabricSpec(Section):
    """How the fabrics are built. All NICs are alike; one per GPU."""

    radix: int = Field(default=64, ge=16, le=1024, multiple_of=16)
    oversubscription: int = Field(default=3, ge=1, le=15)
    pod_nics: int = Field(default=256, ge=8)
    core_share: float = Field(default=0.5, ge=0, le=1)
    """RFabric: ports into the core over uplinks of the racks."""
    delay: DelaySpec = DelaySpec()
    lost: float = Field(default=0.0, ge=0, lt=1)
    """Share of the spine planes, or of the optical switches, that have failed."""
    shares: tuple[Annotated[float, Field(ge=0, le=1)], ...] = Field(default=SHARES, min_length=1)
    """The powers of their bytes by which operations that take turns may share circuits: the planner takes the one that it predicts to be fastest."""
    ecmp: bool = False
    """Hash every flow of the electrical trees onto one uplink, instead of spraying packets."""


class FabricCase(NamedTuple):
    """A job with its traffic, on fabrics built alike."""

    job: FabricJob
    spec: FabricSpec
    sent: Traffic
    seed: int = 1

    @property
    def servers_per_rack(self) -> int:
        """Half of a rack switch's ports go down."""
        return self.spec.radix // 2 // self.job.gpu.gpus_per_server


class Circuits(NamedTuple):
    """A topology that a phase may have."""

    name: str
    links: Links
    core_ports: int
    """The most uplinks of one rack that lead into the core."""


class Iteration(NamedTuple):
    """One RL iteration: each phase's time under the topology it has, and what changing circuits added."""

    seconds: float
    phases: Mapping[Phase, PhaseTime]
    exposed_s: float = 0.0
    num_switches: int = 0
    topology: Mapping[Phase, Circuits] = {}
    networks: Mapping[Phase, Network] = {}


def case(job: FabricJob, spec: FabricSpec, seed: int = 1) -> FabricCase:
    """With the traffic that the job has on it. Raises ValueError where the pods or racks don't hold whole servers."""
    per_server = job.gpu.gpus_per_server
    if spec.pod_nics % (spec.radix // 2) or spec.radix // 2 % per_server:
        raise ValueError(f"pods of {spec.pod_nics} NICs need racks of {spec.radix // 2} NICs, whole servers of {per_server}")
    return FabricCase(job, spec, traffic(job, spec.pod_nics // per_server), seed)


def rounds(job: FabricJob) -> list[tuple[Phase, int]]:
    """Each phase, and how often an iteration runs it."""
    return [("execution", job.spec.updates), ("gradients", job.spec.updates), ("weights_send", 1), ("weights_local", 1)]


def static(case: FabricCase, network: Network) -> Iteration:
    """The iteration on a network that never changes."""
    phases: dict[Phase, PhaseTime] = {phase: phase_time(case.job, case.sent, phase, network) for phase in PHASES}
    seconds = sum(phases[phase].seconds * times for phase, times in rounds(case.job))
    return Iteration(seconds, phases, networks=dict.fromkeys(PHASES, network))


def electrical(case: FabricCase, *, oversubscription: int = 1, rail_optimised: bool = False) -> Iteration:
    """A tree of packet switches."""
    job, spec = case.job, case.spec
    tree = ClosSpec(
        job.servers, spec.radix, job.gpu.nic_busbw_bytes_s, oversubscription, rail_optimised, job.gpu.gpus_per_server,
        spec.lost, case.seed if spec.ecmp else None,
    )  # fmt: skip
    return static(case, clos(tree))


def sip(case: FabricCase) -> Iteration:
    """Servers joined NIC to NIC by a patch panel; circuits by the whole iteration's bytes, the same in all phases."""
    return _kept(case, _panel(case))


def sip_phased(case: FabricCase) -> Iteration:
    """The same patch panel, if it could change between phases as RFabric's circuits do."""
    return switched(case, _panel(case))


def rfabric(case: FabricCase) -> Iteration:
    """Racks joined by circuits, a topology planned for each phase; a change is made where the schedule says it pays."""
    return switched(case, _racks(case))


def layered(case: FabricCase) -> Iteration:
    """RFabric whose circuits may change within the execution too, where the schedule of its windows says that it pays."""
    return switched(case, _racks(case), by_windows=True)


def unweighted(case: FabricCase) -> Iteration:
    """RFabric with operations that take turns planned for as if they ran at once: by their bytes alone."""
    return rfabric(case._replace(spec=case.spec.model_copy(update={"shares": (1.0,)})))


def one_shot(case: FabricCase) -> Iteration:
    """RFabric's hardware with one topology for the whole job, as TopoOpt would patch it."""
    return _kept(case, _racks(case))


class Plane(NamedTuple):
    """What circuits join: racks or servers."""

    servers_per_node: int
    ports: Sequence[int]
    """Of each node."""
    planner: Planner
    rates: LinkRates
    pod_of: Sequence[int] = ()

    def network(self, case: FabricCase, links: Links) -> Network:
        return direct_network(DirectSpec(case.job.servers, self.servers_per_node, self.rates.bytes_s), links)

    def core_ports(self, links: Links) -> int:
        """The most uplinks of one node that lead to another pod."""
        ends = Counter(end for pair in links if self.pod_of and self.pod_of[pair[0]] != self.pod_of[pair[1]] for end in pair)
        return max(ends.values(), default=0)


def _racks(case: FabricCase) -> Plane:
    spec, per_rack = case.spec, case.servers_per_rack
    racks, per_pod = -(-case.job.servers // per_rack), spec.pod_nics // (spec.radix // 2)
    pod_of = [rack // per_pod for rack in range(racks)]
    uplinks = round(spec.radix // 2 * (1 - spec.lost))
    most_core = max(1, round(uplinks * spec.core_share))
    rates = LinkRates(case.job.gpu.nic_busbw_bytes_s)
    return Plane(per_rack, [uplinks] * racks, lambda directed, ports: pod_links(directed, ports, pod_of, most_core), rates, pod_of)


def _panel(case: FabricCase) -> Plane:
    """One circuit per NIC."""
    job = case.job
    degree = max(2, round(job.gpu.gpus_per_server * (1 - case.spec.lost)))
    rates = LinkRates(job.gpu.nic_busbw_bytes_s)
    return Plane(1, [degree] * job.servers, lambda directed, ports: direct(per_link(directed), ports), rates)


def _choose(case: FabricCase, plane: Plane, phases: Sequence[tuple[Phase, int]]) -> Links:
    asked = planned(case.job, case.sent, phases, plane.servers_per_node)
    return choose_links(asked, plane.ports, plane.planner, plane.rates, case.spec.shares)


def _predicted_s(case: FabricCase, plane: Plane, phase: Phase, links: Links) -> float:
    """What the phase takes by prediction, computation and its overlap with the experts' transfers included."""
    job, num = case.job, len(plane.ports)
    asked = planned(job, case.sent, [(phase, 1)], plane.servers_per_node)
    network_s = phase_s(asked, links, num, plane.rates)
    if phase != "execution":
        return network_s
    computing, experts = job.slots * compute_s(job), asked[0]
    return computing + network_s - min(job.spec.overlap * experts.times * run_s(experts, links, num, plane.rates), computing)


def _kept(case: FabricCase, plane: Plane) -> Iteration:
    """One topology, for all phases."""
    links = _choose(case, plane, rounds(case.job))
    found = static(case, plane.network(case, links))
    return found._replace(topology=dict.fromkeys(PHASES, Circuits(ALL, links, plane.core_ports(links))))


def switched(case: FabricCase, plane: Plane, *, by_windows: bool = False) -> Iteration:
    """The iteration with the topologies that the schedule takes by the times that it is predicted to have: one planned for each phase, and one
    for all of them; with `by_windows` also those that change within the execution."""
    job = case.job
    found = {phase: _choose(case, plane, [(phase, 1)]) for phase in PHASES} | {ALL: _choose(case, plane, rounds(job))}
    names = list(found)
    busy = {phase: [_predicted_s(case, plane, phase, links) for links in found.values()] for phase in PHASES}
    within = _within(case, plane, found["execution"], found[ALL]) if by_windows else None
    if within:
        names.append(BY_WINDOWS)
        for phase in PHASES:
            busy[phase].append(job.slots * within.plan.period_s if phase == "execution" else inf)
    costs = {phase: PhaseCost(0.0, tuple(busy[phase])) for phase in PHASES}
    update: tuple[Phase, ...] = ("execution", "gradients")
    sequence: list[Phase] = [*(update * job.spec.updates), "weights_send", "weights_local"]
    plan = schedule([costs[phase] for phase in sequence], case.spec.delay.total_s)
    chosen: dict[Phase, str] = {phase: names[plan.choices[sequence.index(phase)]] for phase in PHASES}
    networks: dict[Phase, Network] = {phase: plane.network(case, found[name]) for phase, name in chosen.items() if name in found}
    phases: dict[Phase, PhaseTime] = {phase: phase_time(job, case.sent, phase, network) for phase, network in networks.items()}
    topology: dict[Phase, Circuits] = {
        phase: Circuits(name, found[name], plane.core_ports(found[name])) for phase, name in chosen.items() if name in found
    }
    exposed_s, changes = plan.exposed_s, plan.num_switches
    if within and "execution" not in phases:
        times = job.spec.updates * job.slots
        exposed_s, changes = exposed_s + times * within.plan.exposed_s, changes + times * within.plan.num_switches
        built = [plane.network(case, links) for links in within.candidates]
        phases = {"execution": windows.execution(job, case.sent, within.windows, within.plan, built), **phases}
        first = within.candidates[within.plan.choices[0]]
        topology = {"execution": Circuits(BY_WINDOWS, first, plane.core_ports(first)), **topology}
    seconds = sum(phases[phase].seconds for phase in sequence) + exposed_s
    return Iteration(seconds, phases, exposed_s, changes, topology, networks)


class Within(NamedTuple):
    """The windows of a micro-batch, and the circuits that they may have."""

    windows: Sequence[tuple[windows.Kind, Window]]
    candidates: Sequence[Links]
    plan: WindowPlan


def window_times(case: FabricCase) -> list[tuple[str, int, float]]:
    """Each kind of window on RFabric's circuits for the execution: its name, how many a micro-batch has, and how long one lasts, by prediction."""
    plane = _racks(case)
    links = _choose(case, plane, [("execution", 1)])
    found: list[tuple[str, int, float]] = []
    for kind in windows.kinds(case.job, case.sent, plane.servers_per_node):
        _, window = windows.window(case.job, kind)
        traffic_s = phase_s(window.operations, links, len(plane.ports), plane.rates)
        found.append((kind.name, kind.windows, max(window.window_s, window.busy_s(traffic_s))))
    return found


def _within(case: FabricCase, plane: Plane, *candidates: Links) -> Within | None:
    """None where no change within a micro-batch pays."""
    job, nodes = case.job, plane.servers_per_node
    kinds = windows.kinds(job, case.sent, nodes)
    background = windows.beside(job, case.sent, nodes)
    own = [
        choose_links([kind.operation, *background], plane.ports, plane.planner, plane.rates, case.spec.shares)
        for kind in kinds
        if kind.operation.directed
    ]
    among = tuple(dict.fromkeys((*candidates, *own)))
    each = windows.micro_batch(job, kinds)
    plan = plan_windows([window for _, window in each], among, len(plane.ports), plane.rates, case.spec.delay.total_s)
    return Within(each, among, plan) if plan.num_switches else None


FABRICS: Final[Mapping[str, Callable[[FabricCase], Iteration]]] = {
    "fat-tree": electrical,
    "rail-optimised": lambda case: electrical(case, rail_optimised=True),
    "oversubscribed": lambda case: electrical(case, oversubscription=case.spec.oversubscription),
    "sip": sip,
    "sip-phased": sip_phased,
    "topoopt-like": one_shot,
    "rfabric": rfabric,
    "rfabric-unweighted": unweighted,
    "rfabric-layered": layered,
}
