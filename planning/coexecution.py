"""Which jobs share nodes: where a job that arrives costs least more, without slowing any job beyond what was agreed.

RollMux (arXiv 2512.11306), section 4.2, Algorithm 1: jobs whose rollout and training alternate fill each other's idle phases. A group is a
training pool, some rollout nodes and the jobs pinned to them, whose states stay in those nodes' host memory. Beyond the paper: what jobs
were seen to take stands in for the longest responses possible (a chance constraint), and environments' CPU cores are a third resource.
Depends on nothing but arguments. Seconds, bytes, US dollars per hour.
"""

import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from typing import Final, NamedTuple
from zlib import crc32

from rubato.planning.consolidation import RolloutTail
from rubato.planning.round_robin import WARM, PhasedJob, StepTimes, overloaded, slowdowns

WORST_WINDOWS: Final = 12
"""Windows that are looked at where durations are certain: each must keep its bound."""

CHANCE_WINDOW: Final = 16
"""Steps that a job's slowdown is taken over where durations scatter: its bound is on how it gets on, not on each step beside a long one."""

FIRST_WINDOWS: Final = 20

ENOUGH: Final = 8
"""Steps that a job was seen to take before they stand in for its longest ones."""

EFFICIENCY: Final = 0.9
"""What a larger training pool than asked for is worth per node: more data parallelism has more to exchange."""

UNBOUNDED: Final = sys.maxsize

CLOSE: Final = 1 + 1e-9


class NodePool(NamedTuple):
    """Nodes of one class."""

    usd_hour: float
    """Of a node: that of its GPU (`GpuSpec.usd_per_hour`) times how many it has."""
    memory_bytes: float
    """Host memory of a node that states may take."""
    nodes: int = UNBOUNDED
    switch_s: float = 0.0
    """Loading a resident job's states before its phase."""
    cores: float = 0.0
    """CPU cores of a node that environments may take; counted on rollout nodes."""


class SharedCluster(NamedTuple):
    """Both pools, and what is agreed about sharing them."""

    rollout: NodePool
    train: NodePool
    residents: int = 5
    """Most jobs of a group."""
    epsilon: float = 0.0
    """Share of time in which a job's bound may be missed, as predicted from steps seen; 0 plans with the longest responses."""


class JobProfile(NamedTuple):
    """A job as it is planned with."""

    name: str
    rollout_s: float
    """With every response at max_tokens."""
    train_s: float
    """On `train_nodes`, with every response at max_tokens."""
    rollout_nodes: int
    train_nodes: int
    rollout_bytes: float
    """Of host memory on each rollout node."""
    train_bytes: float
    """Of host memory on each node of a pool of `train_nodes`."""
    slo: float
    """At least 1: its time in a group may be so many times its time alone."""
    environment_s: float = 0.0
    cores: float = 0.0
    cold_s: float = 0.0
    """To stop and start elsewhere, with its states from storage."""
    seen: tuple[StepTimes, ...] = ()
    """Its latest steps, as they would have gone alone."""
    tail: RolloutTail = RolloutTail()

    @property
    def longest(self) -> StepTimes:
        """Its longest step."""
        return StepTimes(self.environment_s, self.rollout_s, self.train_s)


class PinnedJob(NamedTuple):
    """A job and the rollout nodes that hold its states."""

    job: JobProfile
    nodes: tuple[int, ...]


class CoexecutionGroup(NamedTuple):
    """Jobs that share nodes. Rollout nodes are numbered within the group."""

    number: int
    nodes: tuple[int, ...]
    train_nodes: int
    jobs: tuple[PinnedJob, ...]

    def usd_hour(self, cluster: SharedCluster) -> float:
        """All its nodes."""
        return len(self.nodes) * cluster.rollout.usd_hour + self.train_nodes * cluster.train.usd_hour


class PlacementPlan(NamedTuple):
    """Where a job goes."""

    group: int | None
    """None: it waits for nodes to come free."""
    nodes: tuple[int, ...]
    """Rollout nodes of the group that it is pinned to; numbers that the group lacks are new ones."""
    usd_hour: float
    """What the cluster costs more."""
    slowdown: Mapping[str, float]
    """Per job of the group, its time in it ÷ its time alone, as predicted on average."""
    why: str


def place(job: JobProfile, groups: Sequence[CoexecutionGroup], cluster: SharedCluster) -> PlacementPlan:
    """The cheapest placement of `job` that keeps every bound; of equally cheap ones the first, in the order of `groups`.

    It is tried with no new rollout nodes everywhere, then with one, and so on: the first that fits is the cheapest, since training pools
    are never scaled. Raises ValueError, saying why, where it can never run here.
    """
    refuse(job, cluster)
    shared = share(job, groups, cluster)
    if shared is not None:
        return shared
    rollout_left, train_left = _left(groups, cluster)
    if job.rollout_nodes > rollout_left or job.train_nodes > train_left:
        return PlacementPlan(
            None, (), 0.0, {}, f"job {job.name} waits: no group has room, and {rollout_left} rollout and {train_left} "
            f"training nodes are free of the {job.rollout_nodes} and {job.train_nodes} that it needs",
        )  # fmt: skip
    number = max((group.number for group in groups), default=-1) + 1
    nodes = tuple(range(job.rollout_nodes))
    alone = CoexecutionGroup(number, nodes, job.train_nodes, ())
    usd = alone.usd_hour(cluster)
    why = f"job {job.name} has group {number} to itself for {usd:.2f} $/h: {_why_not(groups, cluster)}"
    return PlacementPlan(number, nodes, usd, {job.name: 1.0}, why)


def share(job: JobProfile, groups: Sequence[CoexecutionGroup], cluster: SharedCluster) -> PlacementPlan | None:
    """The cheapest placement of `job` into one of `groups`, if there is any."""
    rollout_left, _ = _left(groups, cluster)
    joinable = [group for group in groups if len(group.jobs) < cluster.residents and not saturated(group, cluster)]
    loads = [_node_loads(group, cluster) for group in joinable]
    for added in range(min(job.rollout_nodes, rollout_left) + 1):
        for group, load in zip(joinable, loads, strict=True):
            nodes = room(group, job, added, cluster, load)
            if nodes is None:
                continue
            joined = _with(group, PinnedJob(job, nodes))
            found = keeps(joined, cluster)
            if found is not None and _keeps_without_others(joined, cluster):
                return _shared(job, joined, added, found, cluster)
    return None


def _shared(job: JobProfile, group: CoexecutionGroup, added: int, found: Mapping[str, float], cluster: SharedCluster) -> PlacementPlan:
    nodes = group.jobs[-1].nodes
    tightest = max(group.jobs, key=lambda pinned: (found[pinned.job.name] / pinned.job.slo, pinned.job.name)).job
    how = f"{added} new rollout nodes" if added else "no new node"
    usd = added * cluster.rollout.usd_hour
    others = ", ".join(pinned.job.name for pinned in group.jobs[:-1])
    why = (
        f"job {job.name} shares group {group.number} with {others}: {how}, {usd:.2f} $/h more; "
        f"nearest to its bound is {tightest.name} at {found[tightest.name]:.2f} of {tightest.slo:g}"
    )
    return PlacementPlan(group.number, nodes, usd, found, why)


def refuse(job: JobProfile, cluster: SharedCluster) -> None:
    """Raise ValueError, saying why, where `job` can never run on this cluster."""
    cores = job.rollout_nodes * cluster.rollout.cores
    if not job.slo >= 1:
        raise ValueError(f"job {job.name} has an SLO of {job.slo:g}: it must be at least 1, its time alone")
    if job.rollout_nodes < 1 or job.train_nodes < 1 or job.rollout_s <= 0 or job.train_s <= 0:
        raise ValueError(f"job {job.name} needs at least a rollout node and a training node, and phases above 0 s")
    for what, need, pool in (("rollout", job.rollout_nodes, cluster.rollout), ("training", job.train_nodes, cluster.train)):
        if need > pool.nodes:
            raise ValueError(f"job {job.name} needs {need} {what} nodes, and the cluster has {pool.nodes}")
    for what, need, pool in (("rollout", job.rollout_bytes, cluster.rollout), ("training", job.train_bytes, cluster.train)):
        if need > pool.memory_bytes:
            raise ValueError(
                f"job {job.name} needs {need / 1e9:.1f} GB of host memory on a {what} node, which has {pool.memory_bytes / 1e9:.1f} GB"
            )
    if job.cores > cores:
        raise ValueError(f"job {job.name}'s environments need {job.cores:g} cores, and its rollout nodes have {cores:g}")


def saturated(group: CoexecutionGroup, cluster: SharedCluster) -> bool:
    """Whether one of the group's resources is busy for as long as its longest job takes alone: T_load ≥ T_cycle (Algorithm 1)."""
    return busiest(group, cluster) >= 1


def busiest(group: CoexecutionGroup, cluster: SharedCluster) -> float:
    """T_load ÷ T_cycle: what the busiest of the group's resources has to do in a step of each job, over its longest job's time alone."""
    steps = [planned(pinned.job, cluster) for pinned in group.jobs]
    if not steps:
        return 0.0
    cycle = max(sum(step) for step in steps)
    train = math.fsum(s.train * _scale(p.job, group) for s, p in zip(steps, group.jobs, strict=True))
    load = max(train, *_node_loads(group, cluster).values())
    cores = len(group.nodes) * cluster.rollout.cores
    if cores:
        load = max(load, math.fsum(s.environment * p.job.cores for s, p in zip(steps, group.jobs, strict=True)) / cores)
    return load / cycle


def keeps(group: CoexecutionGroup, cluster: SharedCluster) -> dict[str, float] | None:
    """Slowdown per job, on average, or None where the simulated round-robin misses a job's bound.

    On the steps that loads are counted with, no job may miss its bound at all. With ε, steps are then drawn from those seen. A job's bound
    is then SLO times its own time alone of the same quantile: none of 1/ε windows of steps may take longer than SLO times the longest of as
    many windows alone (the chance of the next one, by Laplace's rule of succession, is then below ε). On average, each job keeps its SLO too.
    """
    cores = len(group.nodes) * cluster.rollout.cores
    bounds = [pinned.job.slo * CLOSE for pinned in group.jobs]
    jobs = [phased(pinned, group, [planned(pinned.job, cluster)], cluster) for pinned in group.jobs]
    ratios = None if overloaded(jobs, bounds) else slowdowns(jobs, cores, WORST_WINDOWS, bounds)
    if ratios is not None and any(_known(pinned.job, cluster) for pinned in group.jobs):
        ratios = _by_chance(group, cores, bounds, cluster)
    if ratios is None:
        return None
    means = [math.fsum(own) / len(own) for own in ratios]
    if any(mean > bound for mean, bound in zip(means, bounds, strict=True)):
        return None
    return {pinned.job.name: mean for pinned, mean in zip(group.jobs, means, strict=True)}


def _keeps_without_others(group: CoexecutionGroup, cluster: SharedCluster) -> bool:
    """Whether bounds hold whichever job leaves before the last of `group`'s jobs: who asks first then changes, and first come first served may
    slow who was served well beside more of them. Groups without the last were looked at when their own last joined."""
    *others, last = group.jobs
    return all(
        keeps(group._replace(jobs=(*staying, last)), cluster) is not None
        for num in range(1, len(others))
        for staying in combinations(others, num)
    )


def _by_chance(group: CoexecutionGroup, cores: float, bounds: Sequence[float], cluster: SharedCluster) -> list[list[float]] | None:
    windows = math.ceil(1 / cluster.epsilon)
    ratios = None
    # A few windows refuse most groups at a fraction of the work.
    for num in sorted({min(FIRST_WINDOWS, windows), windows}):
        jobs = [phased(pinned, group, _drawn(pinned.job, num, cluster), cluster) for pinned in group.jobs]
        ratios = slowdowns(jobs, cores, num, bounds, window=CHANCE_WINDOW, most=num)
        if ratios is None:
            break
    return ratios


def phased(pinned: PinnedJob, group: CoexecutionGroup, steps: Sequence[StepTimes], cluster: SharedCluster) -> PhasedJob:
    """The job with `steps` as the group's round-robin has it: its pool's size and what switching takes are in its steps."""
    job, scale = pinned.job, _scale(pinned.job, group)
    rollout_s, train_s = (cluster.rollout.switch_s, cluster.train.switch_s) if len(group.jobs) > 1 else (0.0, 0.0)
    inside = [StepTimes(s.environment, s.rollout + rollout_s, s.train * scale + train_s) for s in steps]
    return PhasedJob(inside, [sum(step) for step in steps], pinned.nodes, job.cores, _after(job, rollout_s, cluster))


def _after(job: JobProfile, switch_s: float, cluster: SharedCluster) -> RolloutTail:
    """The job's tail, of a rollout that begins with so many seconds of loading."""
    whole = planned(job, cluster).rollout
    return job.tail._replace(begins=(switch_s + job.tail.begins * whole) / (switch_s + whole))


def planned(job: JobProfile, cluster: SharedCluster) -> StepTimes:
    """The step that loads are counted with: the mean of those seen where the cluster plans by chance, the longest elsewhere."""
    if not _known(job, cluster):
        return job.longest
    environment, rollout, train = (math.fsum(phase) / len(job.seen) for phase in zip(*job.seen, strict=True))
    return StepTimes(environment, rollout, train)


def _known(job: JobProfile, cluster: SharedCluster) -> bool:
    return cluster.epsilon > 0 and len(job.seen) >= ENOUGH


def _drawn(job: JobProfile, windows: int, cluster: SharedCluster) -> list[StepTimes]:
    """Steps drawn from those seen; each job's own draws, the same at every look (Numerical Recipes' 32-bit generator)."""
    if not _known(job, cluster):
        return [job.longest]
    state = crc32(job.name.encode())
    drawn: list[StepTimes] = []
    for _ in range(WARM + CHANCE_WINDOW + windows):
        state = (1664525 * state + 1013904223) & 0xFFFFFFFF
        drawn.append(job.seen[(state >> 8) % len(job.seen)])
    return drawn


def _scale(job: JobProfile, group: CoexecutionGroup) -> float:
    """How many times as long the job's update takes on the group's pool; its data parallelism fits the pool."""
    share_of = job.train_nodes / group.train_nodes
    return share_of if share_of >= 1 else min(1.0, share_of / EFFICIENCY)


def _node_loads(group: CoexecutionGroup, cluster: SharedCluster) -> dict[int, float]:
    loads = dict.fromkeys(group.nodes, 0.0)
    for pinned in group.jobs:
        seconds = pinned.job.tail.held * planned(pinned.job, cluster).rollout
        for node in pinned.nodes:
            loads[node] += seconds
    return loads


def room(
    group: CoexecutionGroup, job: JobProfile, added: int, cluster: SharedCluster, loads: Mapping[int, float] | None = None
) -> tuple[int, ...] | None:
    """The group's least loaded nodes with room for the job's states, and `added` new ones; None where there is no room."""
    if train_bytes(group, (*(pinned.job for pinned in group.jobs), job)) > cluster.train.memory_bytes * CLOSE:
        return None
    held = dict.fromkeys(group.nodes, job.rollout_bytes)
    for pinned in group.jobs:
        for node in pinned.nodes:
            held[node] += pinned.job.rollout_bytes
    loads = _node_loads(group, cluster) if loads is None else loads
    fitting = [node for node in group.nodes if held[node] <= cluster.rollout.memory_bytes * CLOSE]
    chosen = sorted(fitting, key=lambda node: (loads[node], node))[: job.rollout_nodes - added]
    if len(chosen) < job.rollout_nodes - added:
        return None
    first = max(group.nodes) + 1
    return (*sorted(chosen), *range(first, first + added))


def train_bytes(group: CoexecutionGroup, jobs: Iterable[JobProfile]) -> float:
    """On each node of the pool. A pool smaller than asked for holds the same states on fewer nodes; a larger one has more replicas."""
    return math.fsum(job.train_bytes * max(1.0, job.train_nodes / group.train_nodes) for job in jobs)


def _left(groups: Sequence[CoexecutionGroup], cluster: SharedCluster) -> tuple[int, int]:
    rollout = cluster.rollout.nodes - sum(len(group.nodes) for group in groups)
    return max(0, rollout), max(0, cluster.train.nodes - sum(group.train_nodes for group in groups))


def _why_not(groups: Sequence[CoexecutionGroup], cluster: SharedCluster) -> str:
    full = sum(len(group.jobs) >= cluster.residents for group in groups)
    busy = sum(len(group.jobs) < cluster.residents and saturated(group, cluster) for group in groups)
    if not groups:
        return "there is no other"
    rest = len(groups) - full - busy
    return f"of {len(groups)} groups {busy} are saturated, {full} full, and {rest} lack memory or would miss a bound"


def _with(group: CoexecutionGroup, pinned: PinnedJob) -> CoexecutionGroup:
    new = tuple(node for node in pinned.nodes if node not in group.nodes)
    return group._replace(nodes=group.nodes + new, jobs=(*group.jobs, pinned))


def admit(groups: Sequence[CoexecutionGroup], job: JobProfile, placement: PlacementPlan) -> tuple[CoexecutionGroup, ...]:
    """The groups once `job` is where `placement` puts it; as they are where it waits."""
    if placement.group is None:
        return tuple(groups)
    pinned = PinnedJob(job, placement.nodes)
    joined = tuple(_with(group, pinned) if group.number == placement.group else group for group in groups)
    if any(group.number == placement.group for group in groups):
        return joined
    return (*joined, CoexecutionGroup(placement.group, placement.nodes, job.train_nodes, (pinned,)))


def depart(groups: Sequence[CoexecutionGroup], name: str) -> tuple[CoexecutionGroup, ...]:
    """The groups without the job: rollout nodes without a pinned job are released, and a group without jobs with all it has."""
    left: list[CoexecutionGroup] = []
    for group in groups:
        jobs = tuple(pinned for pinned in group.jobs if pinned.job.name != name)
        held = {node for pinned in jobs for node in pinned.nodes}
        if jobs:
            left.append(group._replace(jobs=jobs, nodes=tuple(node for node in group.nodes if node in held)))
    return tuple(left)
