"""What jobs that share nodes get done: their phases in turn, first come first served on each node (RollMux, arXiv 2512.11306, section 4.3).

A step of a job is its environments' time, its rollout on the nodes it is pinned to, and its update on the training pool. A phase that ends
asks for the next one at once; a rollout needs all its nodes, an update the whole pool. Durations are known, so the first job to ask starts first,
as soon as all that asked before it for any of the same nodes are through, or down to their tails: those go on beside it. Times in seconds.
"""

import math
from collections.abc import Iterator, Sequence
from heapq import heapify, heapreplace
from itertools import accumulate
from typing import Final, NamedTuple

from rubato.planning.consolidation import RolloutTail

WARM: Final = 2
"""Steps of each job that are left out: all begin at once, which a running group's jobs don't."""

WINDOW: Final = 4
"""Steps that a job's slowdown is taken over where durations are certain: what a step waits, the next ones may make up for."""


class StepTimes(NamedTuple):
    """One step, phase by phase; whatever has no environments has 0 for them."""

    environment: float
    """Resets before the rollout and rewards after it, taken as one phase before it."""
    rollout: float
    train: float


class PhasedJob(NamedTuple):
    """A job as its group sees it. `steps` and `alone` are of one length, and repeat."""

    steps: Sequence[StepTimes]
    """In the group: what switching takes is in them, and its training pool's size."""
    alone: Sequence[float]
    """What the same steps take on nodes of its own."""
    nodes: Sequence[int]
    cores: float = 0.0
    """CPU cores that its environments take while they run."""
    tail: RolloutTail = RolloutTail()


def slowdowns(
    jobs: Sequence[PhasedJob], cores: float, windows: int, bounds: Sequence[float], *, window: int = WINDOW, most: float = math.inf
) -> list[list[float]] | None:
    """Per job, its time in the group ÷ its time alone, over every `window` steps of it: at least `windows` such figures each, at most `most`.

    None as soon as `window` steps of a job take longer than its bound times the longest `window` steps that it would have alone: like is
    held against like, the slowest stretch against the slowest. `cores` are the group's, at least those of each job.
    """
    skipped = WARM + window
    enough, last = skipped + windows, skipped + most
    ends: list[list[float]] = [[] for _ in jobs]
    alone = [_sums(job.alone, window) for job in jobs]
    limits = [bound * max(sums) for bound, sums in zip(bounds, alone, strict=True)]
    ratios: list[list[float]] = [[] for _ in jobs]
    short = len(jobs)
    for at, end in _step_ends(jobs, cores):
        own = ends[at]
        own.append(end)
        num = len(own)
        if not skipped < num <= last:
            continue
        took = end - own[-1 - window]
        if took > limits[at]:
            return None
        sums = alone[at]
        ratios[at].append(took / sums[num % len(sums)])
        if num == enough:
            short -= 1
            if not short:
                break
    return ratios


def overloaded(jobs: Sequence[PhasedJob], bounds: Sequence[float]) -> bool:
    """Whether jobs whose steps never differ keep some node or the pool busy for longer than there is time, each as slow as its bound allows."""
    pool = 0.0
    loads: dict[int, float] = {}
    for job, bound in zip(jobs, bounds, strict=True):
        step, longest = job.steps[0], bound * job.alone[0]
        pool += step.train / longest
        for node in job.nodes:
            loads[node] = loads.get(node, 0.0) + job.tail.held * step.rollout / longest
    return max(pool, *loads.values()) > 1


def _sums(alone: Sequence[float], window: int) -> list[float]:
    """By the number of steps done, what the latest `window` of them take alone; it repeats as the steps do."""
    num = len(alone)
    whole, rest = divmod(window, num)
    total = [0.0, *accumulate((*alone, *alone))]
    return [whole * total[num] + total[num + done] - total[num + done - rest] for done in range(num)]


def _step_ends(jobs: Sequence[PhasedJob], cores: float) -> Iterator[tuple[int, float]]:
    """(job, when a step of it ends), without end, in the order in which updates start.

    Planners ask for millions of these, so what decides nothing is left out: a rollout that shares no node and follows no environments
    starts when it is asked for, and its job asks for the pool at once.
    """
    nodes, num_nodes = _shared_nodes(jobs)
    steps = [job.steps for job in jobs]
    waits = [bool(nodes[at]) or any(step.environment for step in own) for at, own in enumerate(steps)]
    rollouts, pool, environments = _RolloutNodes(jobs, nodes, num_nodes), 0.0, _Cores(cores)
    ends = rollouts.ends
    done = [0] * len(jobs)
    asks = [(0.0, at, 0) if waits[at] else (own[0].rollout, at, 2) for at, own in enumerate(steps)]
    heapify(asks)
    while True:
        now, at, phase = asks[0]
        own, number = steps[at], done[at]
        environment, rollout, train = own[number]
        if phase == 2:
            if ends[at] > now:  # its tail was moved meanwhile
                heapreplace(asks, (ends[at], at, 2))
                continue
            pool = (now if now > pool else pool) + train
            done[at] = number = (number + 1) % len(own)
            yield at, pool
            heapreplace(asks, (pool, at, 0) if waits[at] else (pool + own[number].rollout, at, 2))
        elif phase == 0 and environment:
            heapreplace(asks, (environments.taken(now, environment, jobs[at].cores), at, 1))
        else:
            heapreplace(asks, (rollouts.begun(at, now, rollout), at, 2))


def _shared_nodes(jobs: Sequence[PhasedJob]) -> tuple[list[list[int]], int]:
    """Per job, the nodes on which it may wait for others, numbered anew, and how many there are: of nodes that the same jobs share, one."""
    holders: dict[int, list[int]] = {}
    for at, job in enumerate(jobs):
        for node in job.nodes:
            holders.setdefault(node, []).append(at)
    meetings = dict.fromkeys(tuple(held) for held in holders.values() if len(held) > 1)
    return [[number for number, held in enumerate(meetings) if at in held] for at in range(len(jobs))], len(meetings)


class _RolloutNodes:
    """Nodes on which rollouts follow each other. A rollout that is waited for gives them away as its tail begins, one tail at a time."""

    def __init__(self, jobs: Sequence[PhasedJob], nodes: Sequence[Sequence[int]], num_nodes: int) -> None:
        self.ends = [0.0] * len(jobs)
        """Of each job's latest rollout."""
        self._nodes = nodes
        self._tails = [job.tail for job in jobs]
        self._moves = any(tail.begins < 1 for tail in self._tails)
        self._tail_from = [math.inf] * len(jobs)
        """When the latest rollout's tail begins; infinite once it has moved."""
        self._free = [0.0] * num_nodes
        self._last = [-1] * num_nodes
        """The job that had each node last."""
        self._tail_on = [(0.0, 0.0)] * num_nodes
        """Until when the latest tail there lasts, and its share of the engines."""

    def begun(self, at: int, now: float, rollout: float) -> float:
        """When a rollout ends that job `at` asks for now."""
        mine, free = self._nodes[at], self._free
        start, end = now, 0.0
        if self._moves:
            for node in mine:
                if free[node] > now:
                    self.move(self._last[node], now)
        for node in mine:
            if free[node] > start:
                start = free[node]
        end = start + rollout
        if self._moves:
            end = self._beside(mine, start, rollout)
            self._tail_from[at] = self._beside(mine, start, self._tails[at].begins * rollout)
            for node in mine:
                self._last[node] = at
        for node in mine:
            free[node] = end
        self.ends[at] = end
        return end

    def _beside(self, nodes: Sequence[int], start: float, rollout: float) -> float:
        """When so much of a rollout is done that starts on these nodes, which lack the engines of tails for as long as those last."""
        took = rollout
        for until, kept in (self._tail_on[node] for node in nodes):
            if until > start:
                took = max(took, min(rollout / (1 - kept), rollout + kept * (until - start)))
        return start + took

    def move(self, at: int, now: float) -> None:
        """The nodes of job `at` are waited for from now on."""
        mine, end = self._nodes[at], self.ends[at]
        when = max(now, self._tail_from[at], *(self._tail_on[node][0] for node in mine))
        if when >= end:
            return
        tail = self._tails[at]
        self._tail_from[at] = math.inf
        self.ends[at] = when + (end - when) * tail.slower
        for node in mine:
            self._free[node] = when
            self._tail_on[node] = self.ends[at], tail.kept


class _Cores:
    """CPU cores, given out first come first served."""

    def __init__(self, cores: float) -> None:
        self._cores = cores
        self._held: list[tuple[float, float]] = []
        self._last = 0.0

    def taken(self, now: float, seconds: float, cores: float) -> float:
        """When environments end that ask at `now`, not before who asked earlier."""
        now = max(now, self._last)
        self._held = [each for each in self._held if each[0] > now]
        while self._held and sum(held for _, held in self._held) + cores > self._cores * (1 + 1e-9):
            self._held.sort()
            now = self._held.pop(0)[0]
        self._last = now
        self._held.append((now + seconds, cores))
        return now + seconds


def meta_iteration_s(jobs: Sequence[PhasedJob], rounds: int = 32) -> float:
    """Seconds of a meta-iteration in which each job has one rollout and one update, in the order given (Theorem 1 of RollMux).

    Where the longest job alone takes at least as long as all rollouts of the busiest node and as all updates together, it is that job's
    time alone. The mean of the later half of `rounds`; first steps count, environments come before the rollout and wait for nothing.
    """
    nodes, num_nodes = _shared_nodes(jobs)
    rollouts = _RolloutNodes(jobs, nodes, num_nodes)
    pool, half = 0.0, 0.0
    for done in range(2 * (rounds // 2)):
        if done == rounds // 2:
            half = pool
        for at, job in enumerate(jobs):
            if done:  # what asks after a rollout may move its tail
                pool = max(rollouts.ends[at], pool) + job.steps[0].train
            rollouts.begun(at, (pool if done else 0.0) + job.steps[0].environment, job.steps[0].rollout)
    return (pool - half) / (rounds // 2)
