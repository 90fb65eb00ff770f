"""The scheduler's book: every job that the cluster was given, where it is, and where it may go. No process and no clock.

Who shares with whom is decided in planning/coexecution.py. A group is one training node and the rollout nodes of its jobs; it has the
training node's number.
"""

from collections.abc import Iterable, Sequence
from statistics import median
from typing import Literal, NamedTuple

import msgspec

from rubato.actors.cluster.cycles import Cycle
from rubato.actors.cluster.pools import GB, SchedulerSection
from rubato.actors.messages.cluster import JobNeeds
from rubato.planning.coexecution import CoexecutionGroup, JobProfile, PinnedJob, PlacementPlan, SharedCluster, admit, keeps, refuse, share
from rubato.planning.consolidation import RolloutTail
from rubato.planning.regrouping import RegroupingPlan, regroup
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
    limits: tuple[StepTimes, ...] = ()
    """The same steps with every response at max_tokens, at the rates of each; none where the job doesn't say what it sampled."""
    tails: tuple[RolloutTail, ...] = ()
    """Of the same steps."""
    slowdowns: tuple[float, ...] = ()
    """Of its newest steps since it came to its place."""
    planned: StepTimes | None = None
    """What it was placed with."""
    avoids: int = -1
    """The group in which it overran."""
    goes: int = -1
    """The group that it leaves its own for."""
    began_s: float = 0.0
    """Wall clock at which it was started, until its first step there is over; of one that was made to move, at which it was told."""
    moved: bool = False
    """It was made to move, and its first step since is not over."""
    cold_s: float = 0.0
    """What that took until its first rollout."""
    cycles: int = 0
    """Steps since it was started."""
    alone_s: float = 0.0
    """What its steps since it was profiled would have taken alone."""
    took_s: float = 0.0
    """What they took, moves included."""
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
    def kept(self) -> float:
        """Its time since it was profiled ÷ the same alone; 0 before that."""
        return self.took_s / self.alone_s if self.alone_s else 0.0

    @property
    def promise(self) -> str:
        """The bound that it is planned with, or what is missing for one."""
        times = self.times
        if times is None:
            return f"on trial: nothing is promised until {PROFILED} of its steps are profiled"
        at_limit = len(self.seen) < PROFILED or len(self.limits) >= PROFILED
        how = "every response at max_tokens" if at_limit else "its longest step seen"
        return f"promised: at most {self.slo:g} times its time alone, planned with {how}, {sum(times):.1f} s a step"

    @property
    def times(self) -> StepTimes | None:
        """Its longest step, phase by phase: with every response at max_tokens where that is known, else of those seen; None where neither is."""
        if len(self.limits) >= PROFILED:
            return longest(self.limits)
        if len(self.seen) >= PROFILED:
            return longest(self.seen)
        if self.needs.rollout_s > 0 and self.needs.train_s > 0:
            return StepTimes(0.0, self.needs.rollout_s, self.needs.train_s)
        return None


class Spot(NamedTuple):
    """Where a job goes: a group and a rollout node of it. `group` is -1 where it waits."""

    group: int
    node: int
    why: str


class GroupVerdict(NamedTuple):
    """What became of a group's plan: the jobs that leave it, if any, and the sentence for the user."""

    leaves: str
    why: str


def profile(record: JobRecord, section: SchedulerSection, *, as_seen: bool = False) -> JobProfile:
    """The job for planners: one rollout node, one training node. Where its times are not known yet, they mean nothing.

    `as_seen` has its longest step seen and the tail that it had, in place of the limit, where no response ends before the others.
    """
    seen = len(record.seen) >= PROFILED
    times = longest(record.seen) if seen and (as_seen or not record.limits) else record.times
    inside = StepTimes(0.0, section.rollout.switch_s, section.training.switch_s)
    times, needs = _without(times, inside) if times and seen else times or StepTimes(0.0, 1.0, 1.0), record.needs
    cores = min(needs.cores, section.rollout.cores)
    return JobProfile(
        record.name, times.rollout, times.train, 1, 1, needs.rollout_bytes, needs.train_bytes, record.slo,
        environment_s=times.environment, cores=cores, cold_s=max(section.cold_s, record.cold_s),
        seen=tuple(_without(each, inside) for each in record.seen) if seen else (),
        tail=_least(record.tails) if as_seen or not record.limits else RolloutTail(),
    )  # fmt: skip


def longest(steps: Sequence[StepTimes]) -> StepTimes:
    """Phase by phase; of more than a few the longest but one: a permit whose holder was stopped is free only when it lapses."""
    nth = 1 if len(steps) <= LOOKED_AT else 2
    return StepTimes(*(sorted(phase)[-nth] for phase in zip(*steps, strict=True)))


def _without(times: StepTimes, inside: StepTimes) -> StepTimes:
    """What was seen holds the loading of states, which planners add."""
    return StepTimes(*(max(whole / 2, whole - part) for whole, part in zip(times, inside, strict=True)))


def _least(tails: Sequence[RolloutTail]) -> RolloutTail:
    """The tail that frees least of those seen; none before several steps had one."""
    moved = [tail for tail in tails if tail.begins < 1]
    return RolloutTail(max(t.begins for t in moved), max(t.kept for t in moved)) if len(moved) >= PROFILED else RolloutTail()


class Book:
    """All jobs by name."""

    def __init__(self, section: SchedulerSection, records: Iterable[JobRecord] = ()) -> None:
        self.section = section
        self.cluster = section.cluster
        self.jobs = {record.name: record for record in records}
        self.away = frozenset[int]()
        """Rollout nodes that no job can be put on, for their hosts are not there."""

    def queue(self) -> list[JobRecord]:
        """Those that wait for a place, in their turn."""
        return sorted((job for job in self.jobs.values() if job.state == "queued"), key=lambda job: job.number)

    def groups(self, *, as_seen: bool = False) -> list[CoexecutionGroup]:
        """Who shares with whom, by number; jobs in the order in which they came."""
        found: dict[int, list[JobRecord]] = {}
        for job in sorted(self.jobs.values(), key=lambda job: job.number):
            if job.holds:
                found.setdefault(job.group, []).append(job)
        return [
            CoexecutionGroup(
                number, tuple(sorted({job.node for job in jobs})), 1,
                tuple(PinnedJob(profile(job, self.section, as_seen=as_seen), (job.node,)) for job in jobs),
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
        refuse(profile(record, self.section), self.cluster)

    def spot(self, record: JobRecord) -> Spot:
        """Its place now. A job whose times are not known gets free nodes, or else a trial beside others where it fits."""
        spot = self._spot(record)
        return Spot(-1, -1, self._waits(record)) if spot.node in self.away else spot

    def _spot(self, record: JobRecord) -> Spot:
        if record.times is None:
            return self._trial(record)
        groups = self.groups()
        known = [group for group in groups if self._known(group) and group.number != record.avoids]
        meant = [group for group in known if group.number == record.goes]
        plan = self._shared(record, meant) or self._shared(record, known)
        if plan is None:
            return self._alone(record) or Spot(-1, -1, self._waits(record))
        assert plan.group is not None
        (node,) = plan.nodes
        there = next(group for group in groups if group.number == plan.group)
        if node not in there.nodes:
            node = self._free_nodes()[0]
        return Spot(plan.group, node, plan.why)

    def _shared(self, record: JobRecord, groups: Sequence[CoexecutionGroup]) -> PlacementPlan | None:
        """The cheapest place in `groups` where bounds hold both at the limit and as steps were seen: who is served first differs."""
        left, as_seen = list(groups), {group.number: group for group in self.groups(as_seen=True)}
        while left:
            plan = share(profile(record, self.section), left, self._with_nodes_of(left))
            if plan is None or plan.group is None:
                return None
            (joined,) = admit([as_seen[plan.group]], profile(record, self.section, as_seen=True), plan)
            if keeps(joined, self.cluster) is not None:
                return plan
            left = [group for group in left if group.number != plan.group]
        return None

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
        if self.away:
            hosts = sorted({self.section.rollout.host_of(node) for node in self.away})
            free += f"; {len(self.away)} of {self.section.rollout.nodes} rollout nodes lie on {', '.join(hosts)}, not joined yet"
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
        return [node for node in range(self.section.rollout.nodes) if node not in taken | self.away]

    def _free_pools(self) -> list[int]:
        taken = {job.group for job in self.jobs.values() if job.holds}
        return [pool for pool in range(self.section.training.nodes) if pool not in taken]

    # -- once steps were seen ----------------------------------------------------------------------------------

    def stepped(self, cycle: Cycle, at_limit: float = 0.0, now_s: float = 0.0) -> GroupVerdict | None:
        """One more step of a job that runs. What follows from it, if anything does.

        `at_limit` is how many times as many tokens it has with every response at max_tokens; 0 where it doesn't say.
        """
        name, job = cycle.job, self.jobs[cycle.job]
        known = job.times is not None
        job = self.jobs[name] = self._with_step(job, cycle, at_limit, now_s)
        if len(job.seen) == PROFILED or (not known and job.times is not None):
            verdict = self._profiled(job)
            return verdict._replace(why=f"{verdict.why}; {job.promise}")
        if len(job.slowdowns) >= LOOKED_AT and job.slowdown > job.slo and self._group(job).jobs[1:]:
            newest = self._newest(job)
            why = f"job {name} takes {job.slowdown:.2f} of its time alone, above its bound {job.slo:g}: {newest} leaves group {job.group}"
            return GroupVerdict(newest, why)
        drifted = self._drift(job)
        return self._replanned(job, drifted) if drifted else None

    def _with_step(self, job: JobRecord, cycle: Cycle, at_limit: float, now_s: float) -> JobRecord:
        times, alone_s = cycle.times, sum(cycle.times)
        limits = job.limits
        if at_limit:
            limits = (*limits, StepTimes(times.environment, times.rollout * at_limit, times.train * at_limit))[-KEPT_STEPS:]
        tail = cycle.tail._replace(kept=cycle.tail.kept / job.needs.engines)
        away_s = max(0.0, now_s - job.began_s - alone_s - cycle.waited_s) if job.began_s else 0.0
        promised = len(job.seen) >= PROFILED
        moved_s = away_s * job.moved
        return msgspec.structs.replace(
            job, seen=(*job.seen, times)[-KEPT_STEPS:], limits=limits, tails=(*job.tails, tail)[-KEPT_STEPS:],
            slowdowns=(*job.slowdowns, cycle.slowdown)[-KEPT_STEPS:], cycles=job.cycles + 1, began_s=0.0, moved=False, goes=-1,
            cold_s=max(job.cold_s, away_s), alone_s=job.alone_s + alone_s * promised,
            took_s=job.took_s + (alone_s + cycle.waited_s + moved_s) * promised,
        )  # fmt: skip

    def _profiled(self, job: JobRecord) -> GroupVerdict:
        times = longest(job.seen)
        whole = sum(times)
        said = f"job {job.name} is profiled: rollout {times.rollout / whole:.0%}, training {times.train / whole:.0%} of {whole:.1f} s"
        self.jobs[job.name] = msgspec.structs.replace(job, planned=times)
        group = self._group(job)
        others = [other for other in self.groups() if other.number != job.group and self._known(other)]
        if len(group.jobs) == 1:
            better = self._shared(self.jobs[job.name], others)
            if better is not None and better.usd_hour < group.usd_hour(self.cluster):
                return GroupVerdict(job.name, f"{said}; it moves: {better.why}")
            return GroupVerdict("", f"{said}; it stays alone in group {job.group}")
        return self._kept(job, said)

    def _replanned(self, job: JobRecord, drifted: str) -> GroupVerdict:
        newest = {what: getattr(job, what)[-LOOKED_AT:] for what in ("seen", "limits", "tails")}
        self.jobs[job.name] = msgspec.structs.replace(job, planned=_typical(job.seen[-LOOKED_AT:]), **newest)
        return self._kept(job, drifted)

    def _kept(self, job: JobRecord, said: str) -> GroupVerdict:
        """Whether the group still keeps every bound, by what is known now."""
        group = self._group(job)
        guessed = [pinned.job.name for pinned in group.jobs if len(self.jobs[pinned.job.name].seen) < PROFILED]
        if guessed:  # what is seen and what max_tokens say can't be set against each other
            return GroupVerdict("", f"{said}; group {job.group} is judged once {', '.join(guessed)} is profiled too")
        as_seen = next(each for each in self.groups(as_seen=True) if each.number == group.number)
        found = keeps(group, self.cluster)
        if found is None or keeps(as_seen, self.cluster) is None:
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

    def regrouped(self, changed: int) -> RegroupingPlan:
        """Which jobs move now that one has come to `changed`, or left it.

        Groups with a job that is not known yet, or leaves, stay as they are, and so do those that a job is on its way to.
        """
        meant = {job.goes for job in self.jobs.values() if not job.over}
        settled = [
            group
            for group in self.groups()
            if group.number not in meant
            and self._known(group)
            and all(self.jobs[each.job.name].state == "running" and self.jobs[each.job.name].goes < 0 for each in group.jobs)
        ]
        left_s = {each.job.name: self._left_s(self.jobs[each.job.name]) for group in settled for each in group.jobs}
        return regroup(settled, changed, left_s, self._with_nodes_of(settled))

    def _left_s(self, job: JobRecord) -> float:
        """What it has still to go, alone."""
        step_s = sum(_typical(job.seen)) if job.seen else sum(job.times or ())
        return max(0, job.needs.steps - job.step - job.cycles) * step_s

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
