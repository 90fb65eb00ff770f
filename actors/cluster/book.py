"""The scheduler's book: every job that the cluster was given, where it is, and where it may go. No process and no clock.

Who shares with whom is decided in planning/coexecution.py. A group is one training node and the rollout nodes of its jobs; it has the
training node's number.
"""

from collections.abc import Iterable
from statistics import median
from typing import Literal, NamedTuple

import msgspec

from rubato.actors.cluster.pools import GB, SchedulerSection
from rubato.actors.messages.cluster import JobNeeds
from rubato.planning.coexecution import CoexecutionGroup, JobProfile, PinnedJob, SharedCluster, keeps, refuse, share
from rubato.planning.round_robin import StepTimes

PROFILED = 2
"""Steps seen after which a job is planned by what it took."""
KEPT_STEPS = 32
LOOKED_AT = 4
"""Newest steps over which drift and slowdown are taken."""
DRIFT = 0.2
"""Share of a phase's planned time by which it may be longer before the plan is looked at again."""

State = Literal["queued", "running", "leaving", "cancelling", "done", "failed", "cancelled"]
HOLDING = ("running", "leaving", "cancelling")
"""States in which a job has its place."""


class JobRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A job, as the Store has it under `jobs/NAME`."""

    name: str
    id: str
    """Of the submission."""
    number: int
    """Its turn: a job that comes back is a new arrival."""
    slo: float
    needs: JobNeeds
    cwd: str
    state: State = "queued"
    why: str = ""
    """Where it is and why, or what it waits for, or how it ended."""
    group: int = -1
    node: int = -1
    """Of the rollout pool."""
    seen: tuple[StepTimes, ...] = ()
    """Its newest steps, as they would have gone alone."""
    slowdowns: tuple[float, ...] = ()
    """Of its newest steps since it came to its place."""
    planned: StepTimes | None = None
    """What it was placed with."""
    avoids: int = -1
    """The group in which it overran."""
    starts: int = 0
    crashes: int = 0
    """Since it last finished a step."""
    step: int = 0
    """Finished when it last ended."""

    @property
    def holds(self) -> bool:
        """Whether it has its place."""
        return self.state in HOLDING

    @property
    def over(self) -> bool:
        """Whether it is never started again."""
        return self.state in ("done", "failed", "cancelled")

    @property
    def slowdown(self) -> float:
        """The median of its newest steps; 0 before there is one."""
        return median(self.slowdowns[-LOOKED_AT:]) if self.slowdowns else 0.0

    @property
    def times(self) -> StepTimes | None:
        """Its longest step, phase by phase: of those seen, or as max_tokens says; None where neither is known.

        Of more than a few the longest but one: a permit whose holder was stopped is free only when it lapses.
        """
        if len(self.seen) >= PROFILED:
            nth = 1 if len(self.seen) <= LOOKED_AT else 2
            return StepTimes(*(sorted(phase)[-nth] for phase in zip(*self.seen, strict=True)))
        if self.needs.rollout_s > 0 and self.needs.train_s > 0:
            return StepTimes(0.0, self.needs.rollout_s, self.needs.train_s)
        return None


class Spot(NamedTuple):
    """Where a job goes: a group and a rollout node of it. `group` is -1 where it waits."""

    group: int
    node: int
    why: str


class GroupVerdict(NamedTuple):
    """What became of a group's plan: who leaves it, if anybody, and the sentence for the user."""

    leaves: str
    why: str


def profile(record: JobRecord) -> JobProfile:
    """The job for planners: one rollout node, one training node. Where its times are not known yet, they mean nothing."""
    times, needs = record.times or StepTimes(0.0, 1.0, 1.0), record.needs
    return JobProfile(
        record.name, times.rollout, times.train, 1, 1, needs.rollout_bytes, needs.train_bytes, record.slo,
        environment_s=times.environment, seen=record.seen if len(record.seen) >= PROFILED else (),
    )  # fmt: skip


class Book:
    """All jobs by name."""

    def __init__(self, section: SchedulerSection, records: Iterable[JobRecord] = ()) -> None:
        self.section = section
        self.cluster = section.cluster
        self.jobs = {record.name: record for record in records}

    def queue(self) -> list[JobRecord]:
        """Those that wait for a place, in their turn."""
        return sorted((job for job in self.jobs.values() if job.state == "queued"), key=lambda job: job.number)

    def groups(self) -> list[CoexecutionGroup]:
        """Who shares with whom, by number; jobs in the order in which they came."""
        found: dict[int, list[JobRecord]] = {}
        for job in sorted(self.jobs.values(), key=lambda job: job.number):
            if job.holds:
                found.setdefault(job.group, []).append(job)
        return [
            CoexecutionGroup(
                number, tuple(sorted({job.node for job in jobs})), 1, tuple(PinnedJob(profile(job), (job.node,)) for job in jobs)
            )
            for number, jobs in sorted(found.items())
        ]  # fmt: skip

    def check(self, record: JobRecord) -> None:
        """Raises ValueError, one sentence, where the cluster can never run it."""
        for what, need, pool in (
            ("rollout", record.needs.rollout_gpus, self.section.rollout),
            ("training", record.needs.train_gpus, self.section.training),
        ):
            if pool.gpus and need > pool.gpus:
                raise ValueError(f"job {record.name} needs {need} GPUs for {what}, and a {what} node of this cluster has {pool.gpus}")
        refuse(profile(record), self.cluster)

    def spot(self, record: JobRecord) -> Spot:
        """Its place now. A job whose times are not known gets free nodes, or else a trial beside others where it fits."""
        if record.times is None:
            return self._trial(record)
        groups = self.groups()
        known = [group for group in groups if self._known(group) and group.number != record.avoids]
        plan = share(profile(record), known, self._with_nodes_of(known))
        if plan is None:
            return self._alone(record) or Spot(-1, -1, self._waits(record))
        assert plan.group is not None
        (node,) = plan.nodes
        there = next(group for group in groups if group.number == plan.group)
        if node not in there.nodes:
            node = self._free_nodes()[0]
        return Spot(plan.group, node, plan.why)

    def _alone(self, record: JobRecord) -> Spot | None:
        nodes, pools = self._free_nodes(), self._free_pools()
        if not (nodes and pools):
            return None
        usd = self.cluster.rollout.usd_hour + self.cluster.train.usd_hour
        return Spot(pools[0], nodes[0], f"job {record.name} has group {pools[0]} to itself for {usd:.2f} $/h")

    def _trial(self, record: JobRecord) -> Spot:
        """Its phases run by themselves also where it shares: what they take is what they would take alone."""
        alone = self._alone(record)
        if alone is not None:
            return alone._replace(why=f"{alone.why}: {PROFILED} steps are profiled")
        for group in sorted(self.groups(), key=lambda group: len(group.jobs)):
            if len(group.jobs) >= self.cluster.residents or not self._known(group) or not self._fits(record, group):
                continue
            node = min(group.nodes, key=lambda node: sum(node in pinned.nodes for pinned in group.jobs))
            others = ", ".join(pinned.job.name for pinned in group.jobs)
            why = f"job {record.name} shares group {group.number} with {others} on trial: {PROFILED} steps are profiled"
            return Spot(group.number, node, why)
        return Spot(-1, -1, self._waits(record))

    def _waits(self, record: JobRecord) -> str:
        free = f"{len(self._free_nodes())} rollout and {len(self._free_pools())} training nodes are free"
        if any(not self._known(group) for group in self.groups()):
            return f"job {record.name} waits: {free}, and a group has a job whose steps are being profiled"
        return f"job {record.name} waits: no group has room for it within memory and every job's bound, and {free}"

    def _fits(self, record: JobRecord, group: CoexecutionGroup) -> bool:
        """Whether its states have room on every node of `group`."""
        rollout = sum(pinned.job.rollout_bytes for pinned in group.jobs) + record.needs.rollout_bytes
        train = sum(pinned.job.train_bytes for pinned in group.jobs) + record.needs.train_bytes
        return rollout <= self.cluster.rollout.memory_bytes and train <= self.cluster.train.memory_bytes

    def _known(self, group: CoexecutionGroup) -> bool:
        return all(self.jobs[pinned.job.name].times is not None for pinned in group.jobs)

    def _with_nodes_of(self, groups: list[CoexecutionGroup]) -> SharedCluster:
        """The cluster with the rollout nodes of `groups` and those that are free."""
        nodes = sum(len(group.nodes) for group in groups) + len(self._free_nodes())
        return self.cluster._replace(rollout=self.cluster.rollout._replace(nodes=nodes))

    def _free_nodes(self) -> list[int]:
        taken = {job.node for job in self.jobs.values() if job.holds}
        return [node for node in range(self.section.rollout.nodes) if node not in taken]

    def _free_pools(self) -> list[int]:
        taken = {job.group for job in self.jobs.values() if job.holds}
        return [pool for pool in range(self.section.training.nodes) if pool not in taken]

    # -- once steps were seen ----------------------------------------------------------------------------------

    def stepped(self, name: str, times: StepTimes, slowdown: float) -> GroupVerdict | None:
        """One more step of a job that runs. What follows from it, if anything does."""
        job = self.jobs[name]
        known = job.times is not None
        job = self.jobs[name] = msgspec.structs.replace(
            job, seen=(*job.seen, times)[-KEPT_STEPS:], slowdowns=(*job.slowdowns, slowdown)[-KEPT_STEPS:]
        )
        if len(job.seen) == PROFILED or (not known and job.times is not None):
            return self._profiled(job)
        if len(job.slowdowns) >= LOOKED_AT and job.slowdown > job.slo and self._group(job).jobs[1:]:
            newest = self._newest(job)
            why = f"job {name} takes {job.slowdown:.2f} of its time alone, above its bound {job.slo:g}: {newest} leaves group {job.group}"
            return GroupVerdict(newest, why)
        drifted = self._drift(job)
        return self._replanned(job, drifted) if drifted else None

    def _profiled(self, job: JobRecord) -> GroupVerdict:
        times = job.times
        assert times is not None
        whole = sum(times)
        said = f"job {job.name} is profiled: rollout {times.rollout / whole:.0%}, training {times.train / whole:.0%} of {whole:.1f} s"
        self.jobs[job.name] = msgspec.structs.replace(job, planned=times)
        group = self._group(job)
        others = [other for other in self.groups() if other.number != job.group and self._known(other)]
        if len(group.jobs) == 1:
            better = share(profile(self.jobs[job.name]), others, self._with_nodes_of(others))
            if better is not None and better.usd_hour < group.usd_hour(self.cluster):
                return GroupVerdict(job.name, f"{said}; it moves: {better.why}")
            return GroupVerdict("", f"{said}; it stays alone in group {job.group}")
        return self._kept(job, said)

    def _replanned(self, job: JobRecord, drifted: str) -> GroupVerdict:
        self.jobs[job.name] = msgspec.structs.replace(job, planned=_typical(job.seen[-LOOKED_AT:]), seen=job.seen[-LOOKED_AT:])
        return self._kept(job, drifted)

    def _kept(self, job: JobRecord, said: str) -> GroupVerdict:
        """Whether the group still keeps every bound, by what is known now."""
        group = self._group(job)
        guessed = [pinned.job.name for pinned in group.jobs if len(self.jobs[pinned.job.name].seen) < PROFILED]
        if guessed:  # what is seen and what max_tokens say can't be set against each other
            return GroupVerdict("", f"{said}; group {job.group} is judged once {', '.join(guessed)} is profiled too")
        found = keeps(group, self.cluster)
        if found is None:
            newest = self._newest(job)
            return GroupVerdict(newest, f"{said}; group {job.group} would miss a bound: {newest} leaves it")
        each = ", ".join(f"{name} x{slow:.2f}" for name, slow in found.items())
        return GroupVerdict("", f"{said}; group {job.group} keeps every bound ({each} of its time alone)")

    def _drift(self, job: JobRecord) -> str:
        """The sentence where its newest steps outlast its plan."""
        if job.planned is None or len(job.slowdowns) < LOOKED_AT:
            return ""
        now = _typical(job.seen[-LOOKED_AT:])
        for phase, seconds, planned in zip(("rollout", "training"), now[1:], job.planned[1:], strict=True):
            if seconds > planned * (1 + DRIFT):
                return f"the {phase} of job {job.name} takes {seconds:.1f} s, planned {planned:.1f} s"
        return ""

    def _group(self, job: JobRecord) -> CoexecutionGroup:
        return next(group for group in self.groups() if group.number == job.group)

    def _newest(self, job: JobRecord) -> str:
        """Of the job's group, the one that came last."""
        return self._group(job).jobs[-1].job.name

    # -- what it costs -----------------------------------------------------------------------------------------

    def usd_hour(self) -> float:
        """Of all groups."""
        return sum(group.usd_hour(self.cluster) for group in self.groups())

    def usd_hour_solo(self) -> float:
        """If every job that runs had nodes of its own."""
        one = self.cluster.rollout.usd_hour + self.cluster.train.usd_hour
        return one * sum(job.holds for job in self.jobs.values())

    def memory_gb(self, node: int) -> float:
        """Held on that rollout node, in 10^9 bytes."""
        return sum(job.needs.rollout_bytes for job in self.jobs.values() if job.holds and job.node == node) / GB


def _typical(steps: tuple[StepTimes, ...]) -> StepTimes:
    """Phase by phase the median: one step during which something was away says nothing."""
    return StepTimes(*(median(phase) for phase in zip(*steps, strict=True)))
