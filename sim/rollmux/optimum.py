"""The cheapest way to group the jobs of a moment: every set of jobs that could share nodes, every training pool and every placement.

Sets that cannot pay are left out by their bounds, and whole partitions are searched by branch and bound. Where that takes more than
`MOST_LOOKS` looks, a dual bound stands for the optimum, which is no cheaper.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from typing import Final, NamedTuple

from rubato.planning.coexecution import CLOSE, CoexecutionGroup, JobProfile, PinnedJob, SharedCluster, keeps, train_bytes
from rubato.sim.rollmux.multiplexed import Groups

MOST_LOOKS: Final = 4_000

DUAL_PASSES: Final = 4


Sharing = frozenset[frozenset[str]]
"""Which jobs meet on a node: the largest such sets."""


class Block(NamedTuple):
    """Jobs that share nodes, as cheaply as they can."""

    usd_hour: float
    group: CoexecutionGroup


class BoundedPartition(NamedTuple):
    """`bound_usd_hour` is at most what any partition costs; what this one does where `exact`."""

    groups: Groups
    usd_hour: float
    bound_usd_hour: float
    exact: bool


class Optimum:
    """The policy that puts all running jobs together anew, for nothing, at every arrival and departure."""

    def __init__(self, cluster: SharedCluster, blocks: "BlockSearch | None" = None) -> None:
        """`blocks` may be another optimum's, of the same jobs on the same nodes: what it found of them is not searched again."""
        self.cluster = cluster
        self.partitions: list[BoundedPartition] = []
        self._blocks = blocks or BlockSearch(cluster)
        self._jobs: dict[str, JobProfile] = {}
        self._useful: dict[frozenset[str], Block] = {}
        """Of the jobs that run, those that some partition may need."""
        self._least: dict[frozenset[str], float] = {}
        """What the jobs of each set cost at most, in whatever blocks."""

    def arrived(self, groups: Groups, job: JobProfile, left_s: dict[str, float]) -> Groups:
        others = list(self._jobs)
        self._jobs[job.name] = job
        for num in range(min(self.cluster.residents - 1, len(others)) + 1):
            for rest in combinations(others, num):
                self._look(frozenset((*rest, job.name)))
        return self._partition()

    def departed(self, groups: Groups, name: str, left_s: dict[str, float]) -> Groups:
        del self._jobs[name]
        self._useful = {names: block for names, block in self._useful.items() if name not in names}
        self._least = {names: usd for names, usd in self._least.items() if name not in names}
        return self._partition()

    def usd_hour(self, groups: Groups) -> float:
        return self.partitions[-1].bound_usd_hour if self.partitions else 0.0

    def _look(self, names: frozenset[str]) -> None:
        jobs = [self._jobs[name] for name in sorted(names)]
        cut = math.inf
        if len(jobs) > 1:
            cut = min(self._least[names - {job.name}] + self._least[frozenset((job.name,))] for job in jobs)
        block = self._blocks.cheapest(jobs, cut)
        if block is not None:
            self._useful[names] = block
        self._least[names] = cut if block is None else block.usd_hour

    def _partition(self) -> Groups:
        found = cheapest_partition(list(self._jobs), self._useful)
        self.partitions.append(found)
        return found.groups


class BlockSearch:
    """The cheapest group of given jobs that keep their bounds whichever leaves, as the planner demands. Jobs that don't get along with a
    rollout node each are taken not to get along on fewer."""

    def __init__(self, cluster: SharedCluster) -> None:
        self._cluster = cluster
        self._along: dict[tuple[frozenset[str], int, bool], bool] = {}
        self._kept: dict[tuple[frozenset[str], int, Sharing], bool] = {}

    def cheapest(self, jobs: Sequence[JobProfile], cut: float) -> Block | None:
        """One that keeps every bound and costs less than `cut` dollars an hour."""
        rollout, train = self._cluster.rollout.usd_hour, self._cluster.train.usd_hour
        busy = math.fsum(job.rollout_nodes * job.tail.held * job.rollout_s / (job.slo * sum(job.longest)) for job in jobs)
        least = max(math.ceil(busy / CLOSE), *(job.rollout_nodes for job in jobs)) * rollout
        found: Block | None = None
        for pool in sorted({job.train_nodes for job in jobs}):
            if pool * train + least >= cut:
                break
            if self._get_along(jobs, pool, on_a_node=False):
                most = (cut - pool * train) / rollout
                for nodes in sorted(self._placements(jobs, pool, most), key=lambda nodes: max(map(max, nodes))):
                    group = _group(jobs, nodes, pool)
                    if group.usd_hour(self._cluster) >= cut:
                        break
                    if self._keeps(group):
                        cut = group.usd_hour(self._cluster)
                        found = Block(cut, group)
                        break
        return found

    def _keeps(self, group: CoexecutionGroup) -> bool:
        """It hangs on who meets whom, not on how many nodes they meet on."""
        held = {frozenset(p.job.name for p in group.jobs if node in p.nodes) for node in group.nodes}
        meet = frozenset(names for names in held if len(names) > 1 and not any(names < others for others in held))
        key = (frozenset(pinned.job.name for pinned in group.jobs), group.train_nodes, meet)
        if key not in self._kept:
            self._kept[key] = keeps(group, self._cluster) is not None
        return self._kept[key]

    def _get_along(self, jobs: Sequence[JobProfile], pool: int, *, on_a_node: bool) -> bool:
        """Whether they keep their bounds with a node each, or all on one node; fewer of them must."""
        key = (frozenset(job.name for job in jobs), pool, on_a_node)
        if key not in self._along:
            fewer = combinations(jobs, len(jobs) - 1) if len(jobs) > 2 else ()
            nodes = [(0 if on_a_node else at,) for at in range(len(jobs))]
            self._along[key] = all(self._get_along(few, pool, on_a_node=on_a_node) for few in fewer) and (
                len(jobs) == 1 or (self._fits_memory(jobs, pool) and self._keeps(_group(jobs, nodes, pool)))
            )
        return self._along[key]

    def _fits_memory(self, jobs: Sequence[JobProfile], pool: int) -> bool:
        needed = train_bytes(CoexecutionGroup(0, (), pool, ()), jobs)
        return needed <= self._cluster.train.memory_bytes * CLOSE

    def _placements(self, jobs: Sequence[JobProfile], pool: int, most: float) -> Iterator[tuple[tuple[int, ...], ...]]:
        """Each way to pin the jobs to fewer than `most` nodes, once: nodes that hold the same jobs are alike."""
        rollout = self._cluster.rollout

        def fits(on: tuple[int, ...], at: int) -> bool:
            there = [jobs[own] for own in (*on, at)]
            held = sum(job.rollout_bytes for job in there)
            return held <= rollout.memory_bytes * CLOSE and self._get_along(there, pool, on_a_node=True)

        def rest(at: int, held: tuple[tuple[int, ...], ...]) -> Iterator[tuple[tuple[int, ...], ...]]:
            if at == len(jobs):
                yield tuple(tuple(node for node, on in enumerate(held) if own in on) for own in range(at))
                return
            alike: dict[tuple[int, ...], list[int]] = {}
            for node, on in enumerate(held):
                alike.setdefault(on, []).append(node)
            for chosen in _chosen([nodes for on, nodes in alike.items() if fits(on, at)], jobs[at].rollout_nodes):
                new = jobs[at].rollout_nodes - len(chosen)
                if len(held) + new < most:
                    grown = tuple((*on, at) if node in chosen else on for node, on in enumerate(held))
                    yield from rest(at + 1, grown + ((at,),) * new)

        return rest(0, ())


def _group(jobs: Sequence[JobProfile], nodes: Sequence[tuple[int, ...]], pool: int) -> CoexecutionGroup:
    pinned = tuple(PinnedJob(job, own) for job, own in zip(jobs, nodes, strict=True))
    return CoexecutionGroup(0, tuple(sorted({node for own in nodes for node in own})), pool, pinned)


def _chosen(classes: list[list[int]], most: int) -> Iterator[tuple[int, ...]]:
    """Up to `most` nodes, the first ones of each class."""
    if not classes:
        yield ()
        return
    for num in range(min(most, len(classes[0])) + 1):
        for others in _chosen(classes[1:], most - num):
            yield (*classes[0][:num], *others)


def cheapest_partition(names: Sequence[str], blocks: Mapping[frozenset[str], Block]) -> BoundedPartition:
    """`blocks` hold each job alone too."""
    bit = {name: 1 << at for at, name in enumerate(sorted(names, key=lambda n: -blocks[frozenset((n,))].usd_hour))}
    prices = _prices(names, blocks)
    by_first: dict[int, list[tuple[float, int, Block]]] = {one: [] for one in bit.values()}
    for held, block in blocks.items():
        mask = sum(bit[name] for name in held)
        by_first[mask & -mask].append((block.usd_hour - math.fsum(prices[name] for name in held), mask, block))
    for options in by_first.values():
        options.sort(key=lambda option: option[:2])
    bound = math.fsum(prices.values())
    search = _Search(by_first, bound)
    search.go((1 << len(bit)) - 1, 0.0, ())
    exact = search.looks < MOST_LOOKS
    usd_hour = math.fsum(block.usd_hour for block in search.best)
    return BoundedPartition(tuple(block.group for block in search.best), usd_hour, usd_hour if exact else bound, exact)


class _Search:
    """Branch and bound: the first job left goes with each block that holds it. What a partition costs above the bound is its blocks' excess."""

    def __init__(self, by_first: Mapping[int, Sequence[tuple[float, int, Block]]], bound: float) -> None:
        self._by_first = by_first
        self._least = math.inf
        self._close = 1e-9 * bound
        self.best: tuple[Block, ...] = ()
        self.looks = 0

    def go(self, left: int, excess: float, blocks: tuple[Block, ...]) -> None:
        if not left:
            self._least, self.best = excess, blocks
            return
        for more, mask, block in self._by_first[left & -left]:
            if excess + more >= self._least - self._close or self.looks >= MOST_LOOKS:
                return
            if mask & left == mask:
                self.looks += 1
                self.go(left & ~mask, excess + more, (*blocks, block))


def _prices(names: Sequence[str], blocks: Mapping[frozenset[str], Block]) -> dict[str, float]:
    """What each job must cost at least: no block is cheaper than the prices of its jobs, so no partition is than all (the dual problem)."""
    alone = {name: blocks[frozenset((name,))].usd_hour for name in names}
    prices = dict(alone)
    holding: dict[str, list[tuple[frozenset[str], float]]] = {name: [] for name in names}
    for held, block in blocks.items():
        part = block.usd_hour / math.fsum(alone[name] for name in held)
        for name in held:
            holding[name].append((held, block.usd_hour))
            prices[name] = min(prices[name], alone[name] * part)
    for _ in range(DUAL_PASSES):
        for name in names:
            prices[name] += min(usd - math.fsum(prices[other] for other in held) for held, usd in holding[name])
    return prices
