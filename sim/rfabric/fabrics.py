"""The fabrics under comparison: each turns a job's traffic into the time of its phases."""

from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

from pydantic import Field

from rubato.planning.demand import Links, per_link
from rubato.planning.pods import plan_pods
from rubato.planning.switching import PhaseCost, schedule
from rubato.planning.topology import direct
from rubato.runtime.config import Section
from rubato.sim.net.clos import ClosSpec, clos
from rubato.sim.net.direct import DirectSpec, direct_network
from rubato.sim.net.network import Network
from rubato.sim.rfabric.iteration import PhaseTime, Traffic, demand, phase_time, traffic
from rubato.sim.rfabric.job import PHASES, FabricJob, Phase

STAGE_WEIGHTS = (4, 16, 64)
"""Candidates beside the plain one wherever the execution's traffic is planned for; the fastest is taken.

The live FabricController has no such search: it plans one topology per phase, by the bytes as they are.
"""


ALL = "all"
"""Begins the names of topologies planned for the whole iteration."""


class DelaySpec(Section):
    """What a change of circuits takes, part by part, in seconds. They follow each other."""

    drain_s: float = Field(default=0.0, ge=0)
    control_s: float = Field(default=0.0, ge=0)
    """Request and answer, over all switches."""
    ocs_s: float = Field(default=0.010, ge=0)
    """Mirrors; 3D MEMS by default (RFabric, Table 2)."""
    relink_s: float = Field(default=0.0, ge=0)
    """Until transceivers and network cards carry packets again: milliseconds to seconds."""


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
    ecmp: bool = False
    """Hash every flow of the electrical trees onto one uplink, instead of spraying packets."""


class FabricCase(NamedTuple):
    """A job with its traffic, on fabrics built alike."""

    job: FabricJob
    spec: FabricSpec
    sent: Traffic
    seed: int = 1
    stage_weights: Sequence[int] = STAGE_WEIGHTS

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
    return _fastest([static(case, _panel_network(case, circuits)) for circuits in _whole(case, _panel)])


def sip_phased(case: FabricCase) -> Iteration:
    """The same patch panel, if it could change between phases as RFabric's circuits do."""
    return switched(case, _candidates(case, _panel), _panel_network)


def rfabric(case: FabricCase) -> Iteration:
    """Racks joined by circuits, a topology planned for each phase; a change is made where the schedule says it pays."""
    return switched(case, _candidates(case, _planned), _rack_network)


def unweighted(case: FabricCase) -> Iteration:
    """RFabric without the search over stage weights: as the live controller plans, one topology per phase and one for all of them."""
    return rfabric(case._replace(stage_weights=()))


def switched(case: FabricCase, candidates: Sequence[Circuits], network: Callable[[FabricCase, Circuits], Network]) -> Iteration:
    """The iteration with the candidate of each phase that the schedule takes, out of those planned for it or for all phases."""
    networks = [network(case, circuits) for circuits in candidates]
    times: dict[Phase, dict[int, PhaseTime]] = {
        phase: {
            k: phase_time(case.job, case.sent, phase, networks[k])
            for k, circuits in enumerate(candidates)
            if circuits.name.startswith((phase, ALL))
        }
        for phase in PHASES
    }
    update: tuple[Phase, ...] = ("execution", "gradients")
    sequence: list[Phase] = [*(update * case.job.spec.updates), "weights_send", "weights_local"]
    delay = case.spec.delay
    total = delay.drain_s + delay.control_s + delay.ocs_s + delay.relink_s
    never = float("inf")
    costs = {
        phase: PhaseCost(0.0, tuple(times[phase][k].seconds if k in times[phase] else never for k in range(len(candidates))))
        for phase in PHASES
    }
    plan = schedule([costs[phase] for phase in sequence], total)
    chosen: dict[Phase, int] = {phase: plan.choices[sequence.index(phase)] for phase in PHASES}
    phases: dict[Phase, PhaseTime] = {phase: times[phase][k] for phase, k in chosen.items()}
    topology: dict[Phase, Circuits] = {phase: candidates[k] for phase, k in chosen.items()}
    kept: dict[Phase, Network] = {phase: networks[k] for phase, k in chosen.items()}
    return Iteration(plan.period_s, phases, plan.exposed_s, plan.num_switches, topology, kept)


def one_shot(case: FabricCase) -> Iteration:
    """RFabric's hardware with one topology for the whole job, as TopoOpt would patch it; the fastest of those that RFabric may keep."""
    return _fastest([static(case, _rack_network(case, circuits)) for circuits in _whole(case, _planned)])


def _fastest(found: Sequence[Iteration]) -> Iteration:
    return min(found, key=lambda iteration: iteration.seconds)


Planner = Callable[[FabricCase, str, list[tuple[Phase, int]], int], Circuits]


def _candidates(case: FabricCase, planner: Planner) -> list[Circuits]:
    """One topology per phase, more of the execution, and those for the whole iteration."""
    found = [planner(case, phase, [(phase, 1)], 1) for phase in PHASES]
    found += [planner(case, f"execution, stages x{w}", [("execution", 1)], w) for w in case.stage_weights]
    return [*found, *_whole(case, planner)]


def _whole(case: FabricCase, planner: Planner) -> list[Circuits]:
    """Topologies for the whole iteration."""
    weighted = [planner(case, f"{ALL}, stages x{w}", rounds(case.job), w) for w in case.stage_weights]
    return [planner(case, ALL, rounds(case.job), 1), *weighted]


def _planned(case: FabricCase, name: str, phases: list[tuple[Phase, int]], stage_weight: int = 1) -> Circuits:
    """Circuits between racks."""
    job, spec, per_rack = case.job, case.spec, case.servers_per_rack
    racks = -(-job.servers // per_rack)
    per_pod = spec.pod_nics // (spec.radix // 2)
    uplinks = round(spec.radix // 2 * (1 - spec.lost))
    plan = plan_pods(
        demand(job, case.sent, phases, per_rack, stage_weight), [rack // per_pod for rack in range(racks)], uplinks,
        max(1, round(uplinks * spec.core_share)),
    )  # fmt: skip
    return Circuits(name, tuple(sorted(plan.pod + plan.core)), max(split.core for split in plan.splits))


def _panel(case: FabricCase, name: str, phases: list[tuple[Phase, int]], stage_weight: int = 1) -> Circuits:
    """Circuits between servers, one per NIC."""
    job = case.job
    degree = max(2, round(job.gpu.gpus_per_server * (1 - case.spec.lost)))
    between = per_link(demand(job, case.sent, phases, 1, stage_weight))
    return Circuits(name, direct(between, [degree] * job.servers), 0)


def _rack_network(case: FabricCase, circuits: Circuits) -> Network:
    job = case.job
    return direct_network(DirectSpec(job.servers, case.servers_per_rack, job.gpu.nic_busbw_bytes_s), circuits.links)


def _panel_network(case: FabricCase, circuits: Circuits) -> Network:
    return direct_network(DirectSpec(case.job.servers, 1, case.job.gpu.nic_busbw_bytes_s), circuits.links)


FABRICS: Final[Mapping[str, Callable[[FabricCase], Iteration]]] = {
    "fat-tree": electrical,
    "rail-optimised": lambda case: electrical(case, rail_optimised=True),
    "oversubscribed": lambda case: electrical(case, oversubscription=case.spec.oversubscription),
    "sip": sip,
    "sip-phased": sip_phased,
    "topoopt-like": one_shot,
    "rfabric": rfabric,
    "rfabric-unweighted": unweighted,
}
