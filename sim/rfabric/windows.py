"""Circuits that change within the execution: between the windows of a micro-batch, layer by layer."""

from collections.abc import Sequence
from typing import NamedTuple

from rubato.planning import phase_time as planning
from rubato.planning.windows import Window, WindowPlan
from rubato.sim.net.network import FlowsDone, Network, complete, flows
from rubato.sim.rfabric.iteration import PhaseTime, Traffic, operations, planned
from rubato.sim.rfabric.job import FabricJob, compute_s


class Kind(NamedTuple):
    """One kind of window."""

    name: str
    operation: planning.Operation
    """All of the execution's: what circuits of its own are planned for."""
    times: float
    """How often its transfers run in one window."""
    serial_s: float
    windows: int
    """In one micro-batch."""


def kinds(job: FabricJob, sent: Traffic, servers_per_node: int) -> list[Kind]:
    """Attention, with ring attention's transfers; experts, a dispatch and a combine; stages, once. Computation is shared by FLOPs.

    A layer has one window of the first two kinds forward and one backward, taken to be alike.
    """
    model, layers = job.model, job.layers
    attention = 2 * model.attention_params + 2 * job.spec.sequence_tokens * model.heads * model.head_dim
    feed = 2 * (model.always_params - model.attention_params + model.experts_per_token * model.expert_params)
    each_s = compute_s(job) / (2 * layers)
    found = dict(
        zip(
            (name for name, _, _ in operations(job, sent, "execution")),
            planned(job, sent, [("execution", 1)], servers_per_node),
            strict=True,
        )
    )
    share = attention / (attention + feed)
    context = 3 * (job.spec.context - 1) / 2
    return [
        Kind("context", found["context"], context, each_s * share, 2 * layers),
        Kind("experts", found["experts"], 2.0, each_s * (1 - share), 2 * layers),
        Kind("stages", found["stages"], 1.0, 0.0, 1),
    ]


def beside(job: FabricJob, sent: Traffic, servers_per_node: int) -> list[planning.Operation]:
    """What generation sends meanwhile."""
    return [each for each in planned(job, sent, [("execution", 1)], servers_per_node) if each.beside]


def micro_batch(job: FabricJob, found: Sequence[Kind]) -> list[tuple[Kind, Window]]:
    """The windows of one, in their order. One without transfers is quiet: a change may hide in all of it."""
    context, experts, stages = (window(job, kind) for kind in found)
    return [*[context, experts] * job.layers, *[experts, context] * job.layers, stages]


def window(job: FabricJob, kind: Kind) -> tuple[Kind, Window]:
    """One of this kind."""
    if not kind.operation.directed and not kind.operation.floor_s:
        return kind, Window((), kind.serial_s)
    overlap = job.spec.overlap if kind.name == "experts" else 0.0
    return kind, Window((kind.operation._replace(times=kind.times),), 0.0, kind.serial_s, overlap)


def execution(
    job: FabricJob, sent: Traffic, windows: Sequence[tuple[Kind, Window]], plan: WindowPlan, networks: Sequence[Network]
) -> PhaseTime:
    """All micro-batches, one after another, each window on the network of its candidate; without what changes expose."""
    transfers = {name: of for name, _, of in operations(job, sent, "execution")}
    done: dict[tuple[str, int], FlowsDone] = {}
    times: dict[tuple[str, int], float] = {}
    seconds = network_s = 0.0
    for (kind, each), k in zip(windows, plan.choices, strict=True):
        key = kind.name, k
        if key not in done:
            done[key] = complete(networks[k], flows(transfers[kind.name], float(job.gpu.gpus_per_server)))
        traffic_s = kind.times * done[key].seconds
        times[key] = times.get(key, 0.0) + kind.times * job.slots
        seconds += max(each.window_s, each.busy_s(traffic_s)) * job.slots
        network_s += traffic_s * job.slots
    return PhaseTime(seconds, network_s, tuple((name, times[name, k], ran) for (name, k), ran in done.items()))
