"""Jobs that come, share nodes as some policy says, and go: what they cost, and which of them kept their bound.

A job has its steps to do, so one that is slowed pays longer. Between two arrivals or departures the groups stay as they are, and
each job gets on at the rate of its group's simulated round-robin.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

from pydantic import Field

from rubato.planning.coexecution import CoexecutionGroup, JobProfile, NodePool, SharedCluster, phased
from rubato.planning.hardware import GpuSpec
from rubato.planning.round_robin import StepTimes, slowdowns
from rubato.runtime.config import Section

HOUR_S = 3600.0
WINDOWS = 12
"""Of four steps each, from which a job's rate is averaged."""

Groups = tuple[CoexecutionGroup, ...]


class PoolsSpec(Section):
    """Two pools of nodes of one kind each, as many as jobs need."""

    rollout: GpuSpec
    train: GpuSpec
    memory_bytes: float = Field(gt=0)
    """Host memory of a node that states may take."""
    rollout_switch_s: float = Field(default=0.0, ge=0)
    train_switch_s: float = Field(default=0.0, ge=0)
    """Loading a resident job's states before its phase."""

    def cluster(self, residents: int = 5, epsilon: float = 0.0) -> SharedCluster:
        rollout = NodePool(node_usd_hour(self.rollout), self.memory_bytes, switch_s=self.rollout_switch_s)
        train = NodePool(node_usd_hour(self.train), self.memory_bytes, switch_s=self.train_switch_s)
        return SharedCluster(rollout, train, residents, epsilon)


def node_usd_hour(gpu: GpuSpec) -> float:
    if gpu.usd_per_hour is None:
        raise ValueError(f"{gpu.name} has no usd_per_hour")
    return gpu.gpus_per_server * gpu.usd_per_hour


class JobSize(Section):
    """What a model of one size needs."""

    nodes: int = Field(ge=1)
    """Of each pool."""
    rollout_bytes: float = Field(gt=0)
    """Host memory on each node."""
    train_bytes: float = Field(gt=0)
    cold_s: float = Field(default=0.0, ge=0)
    """To stop and start elsewhere."""


class Arrival(NamedTuple):
    """`work_s` is what all its steps take alone."""

    at_s: float
    work_s: float
    job: JobProfile


class SharingPolicy(Protocol):
    """Decides where jobs are."""

    def arrived(self, groups: Groups, job: JobProfile, left_s: dict[str, float]) -> Groups:
        """`left_s` is what every job has still to go, alone, and becomes more where a move costs time."""
        ...

    def departed(self, groups: Groups, name: str, left_s: dict[str, float]) -> Groups:
        """`groups` still hold the job, `left_s` does not."""
        ...

    def usd_hour(self, groups: Groups) -> float:
        """What `groups` count for."""
        ...


class Multiplexed(NamedTuple):
    """One policy's run."""

    usd: float
    seconds: float
    slowdown: Mapping[str, float]
    """Per job, its time from arrival to end ÷ its time alone."""
    attained: float
    """Share of jobs that kept their bound."""
    peak_usd_hour: float
    rollout_nodes: float
    """On average, while it lasted."""
    train_nodes: float

    @property
    def usd_hour(self) -> float:
        return self.usd / self.seconds * HOUR_S


Rates = Callable[[CoexecutionGroup], Mapping[str, float]]


def certain_rates(cluster: SharedCluster) -> Rates:
    """Per job of a group, its time in it ÷ its time alone where every step takes as long as planned with."""

    def found(group: CoexecutionGroup) -> Mapping[str, float]:
        steps: list[Sequence[StepTimes]] = [[pinned.job.longest] for pinned in group.jobs]
        return mean_slowdowns(group, steps, WINDOWS, cluster)

    return found


def mean_slowdowns(
    group: CoexecutionGroup, steps: Sequence[Sequence[StepTimes]], windows: int, cluster: SharedCluster
) -> Mapping[str, float]:
    """Per job, with these `steps`."""
    jobs = [phased(pinned, group, own, cluster) for pinned, own in zip(group.jobs, steps, strict=True)]
    ratios = slowdowns(jobs, len(group.nodes) * cluster.rollout.cores, windows, [math.inf] * len(jobs))
    assert ratios is not None  # no bound was given
    return {p.job.name: math.fsum(own) / len(own) for p, own in zip(group.jobs, ratios, strict=True)}


class MultiplexedRun:
    """`arrivals` in order of time. Every job is placed at once: the cluster must have nodes enough."""

    def __init__(self, arrivals: Sequence[Arrival], policy: SharingPolicy, cluster: SharedCluster, rates: Rates | None = None) -> None:
        self._arrivals = arrivals
        self._policy = policy
        self._cluster = cluster
        self._rates = rates or certain_rates(cluster)
        self._groups: Groups = ()
        self._slowdown: dict[str, float] = {}
        """At present, of each job that runs."""
        self._left: dict[str, float] = {}
        self._now = 0.0
        self._usd = self._rollout_s = self._train_s = self._peak = 0.0

    def run(self) -> Multiplexed:
        by_name = {arrival.job.name: arrival for arrival in self._arrivals}
        took: dict[str, float] = {}
        coming = list(reversed(self._arrivals))
        while coming or self._left:
            name, ends = min(
                ((name, self._now + left * self._slowdown[name]) for name, left in self._left.items()),
                key=lambda item: item[1],
                default=("", math.inf),
            )
            if coming and coming[-1].at_s <= ends:
                arrival = coming.pop()
                self._until(arrival.at_s)
                self._left[arrival.job.name] = arrival.work_s
                self._become(self._policy.arrived(self._groups, arrival.job, self._left))
            else:
                self._until(ends)
                del self._left[name]
                took[name] = (ends - by_name[name].at_s) / by_name[name].work_s
                self._become(self._policy.departed(self._groups, name, self._left))
        seconds = self._now - self._arrivals[0].at_s
        attained = sum(took[name] <= by_name[name].job.slo * (1 + 1e-6) for name in took) / len(took)
        return Multiplexed(self._usd, seconds, took, attained, self._peak, self._rollout_s / seconds, self._train_s / seconds)

    def _until(self, when: float) -> None:
        elapsed = when - self._now
        self._usd += self._policy.usd_hour(self._groups) * elapsed / HOUR_S
        for group in self._groups:
            self._rollout_s += len(group.nodes) * elapsed
            self._train_s += group.train_nodes * elapsed
        for name in self._left:
            self._left[name] = max(0.0, self._left[name] - elapsed / self._slowdown[name])
        self._now = when

    def _become(self, groups: Groups) -> None:
        """Only the rates of groups that changed are found anew."""
        before = set(map(id, self._groups))
        for group in groups:
            if id(group) not in before:
                self._slowdown.update(self._rates(group))
        self._groups = groups
        self._peak = max(self._peak, self._policy.usd_hour(groups))
