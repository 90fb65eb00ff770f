"""One RL iteration on a fabric: how long each phase takes on a network, and the operations by which circuits are planned."""

from collections.abc import Sequence
from math import inf
from typing import NamedTuple

from rubato.planning import phase_time as planning
from rubato.sim.net.collectives import Transfer
from rubato.sim.net.network import FlowsDone, Network, complete, flows
from rubato.sim.rfabric import job as jobs
from rubato.sim.rfabric.job import FabricJob, Operation, Phase

BACKGROUND = ("responses", "gen_")


class Traffic(NamedTuple):
    """The transfers of a job: of one operation each, and how often the operation runs in its phase."""

    experts: list[Transfer]
    context: list[Transfer]
    stages: list[Transfer]
    gradients: list[Transfer]
    send: list[Transfer]
    local: list[Transfer]
    responses: list[Transfer]
    generation: list[Operation]


class PhaseTime(NamedTuple):
    """A phase, once. `seconds` of it are spent, `network_s` of these on the network; `runs` are the network's."""

    seconds: float
    network_s: float
    runs: tuple[tuple[str, float, FlowsDone], ...]
    """Operation, how often it ran, and how it ran once."""


def traffic(job: FabricJob, pod_servers: int) -> Traffic:
    """Everything the job sends between servers."""
    pods = jobs.generation_pods(job, pod_servers)
    return Traffic(
        jobs.expert_transfers(job), jobs.context_transfers(job), jobs.stage_transfers(job), jobs.gradient_transfers(job),
        jobs.weight_send(job, pods), jobs.weight_local(job, pods), jobs.responses(job),
        jobs.generation_operations(job, pods),
    )  # fmt: skip


def operations(job: FabricJob, sent: Traffic, phase: Phase) -> list[Operation]:
    """Name, how often in one run of the phase, and transfers."""
    if phase == "execution":  # per layer dispatch and combine, forward and backward
        layers = float(job.layers * job.slots)
        round_ = 3 * (job.spec.context - 1) * layers  # backward moves keys, values and their gradients
        per_update = [("experts", 4 * layers, sent.experts), ("context", round_, sent.context)]
        background = [("responses", 1 / job.spec.updates, sent.responses), *sent.generation]
        return [*per_update, ("stages", 1.0 * job.slots, sent.stages), *background]
    if phase == "gradients":
        return [("gradients", 1.0, sent.gradients)]
    return [(phase, 1.0, sent.send if phase == "weights_send" else sent.local)]


def phase_time(job: FabricJob, sent: Traffic, phase: Phase, network: Network) -> PhaseTime:
    """The phase on `network`: computation and transfers one after another, but for the overlap that the job states.

    What `BACKGROUND` names belongs to generation and runs beside it; each is timed alone and lengthens nothing.
    """
    runs: list[tuple[str, float, FlowsDone]] = []
    network_s = hidden_s = 0.0
    for name, times, transfers in operations(job, sent, phase):
        done = complete(network, flows(transfers, float(job.gpu.gpus_per_server)))
        runs.append((name, times, done))
        if not name.startswith(BACKGROUND):
            network_s += times * done.seconds
        if name == "experts":
            hidden_s = job.spec.overlap * times * done.seconds
    computing = job.slots * jobs.compute_s(job) if phase == "execution" else 0.0
    return PhaseTime(computing + network_s - min(hidden_s, computing), network_s, tuple(runs))


def planned(job: FabricJob, sent: Traffic, phases: Sequence[tuple[Phase, int]], servers_per_node: int) -> list[planning.Operation]:
    """The operations of the given phases, each so many times, as planners see them: bytes between nodes, and what the NICs take anyway."""
    nics = job.gpu.gpus_per_server * job.gpu.nic_busbw_bytes_s if servers_per_node > 1 else inf
    found: list[planning.Operation] = []
    for phase, runs in phases:
        for name, times, transfers in operations(job, sent, phase):
            directed: dict[tuple[int, int], float] = {}
            ends: dict[tuple[int, bool], float] = {}
            for a, b, size in transfers:
                pair = a // servers_per_node, b // servers_per_node
                if pair[0] != pair[1]:
                    directed[pair] = directed.get(pair, 0.0) + size
                if a != b:
                    ends[a, False] = ends.get((a, False), 0.0) + size
                    ends[b, True] = ends.get((b, True), 0.0) + size
            whole = {pair: round(size) for pair, size in directed.items()}
            floor_s = max(ends.values(), default=0.0) / nics
            found.append(planning.Operation(whole, times * runs, floor_s, name.startswith(BACKGROUND)))
    return found
