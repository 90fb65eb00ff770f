"""What a user sees of a cluster: its groups, who holds a permit and who waits for it, and what it costs."""

from pathlib import Path
from typing import NamedTuple

import msgspec

from rubato.actors.cluster.book import Book, JobRecord
from rubato.actors.cluster.lease import ROLLOUT
from rubato.actors.cluster.permits import PermitEvent, Permits
from rubato.planning.consolidation import TAIL
from rubato.planning.permits import PermitLine
from rubato.runtime.config.compose import load
from rubato.runtime.errors import LaunchError
from rubato.runtime.launch.card import read_card
from rubato.runtime.launch.connection import connect
from rubato.runtime.launch.folder import is_held
from rubato.runtime.launch.shared import open_shared
from rubato.runtime.monitor.snapshot import lookup, total
from rubato.runtime.monitor.source import RowTail, RunSource, read_config
from rubato.runtime.observe.trace import wall_s

GANTT_CYCLES_S = 60.0
MARKS = "abcdefghijklmnopqrstuvwxyz"


class RolloutLeft(NamedTuple):
    """What a job that generates still has to."""

    num: int
    """Responses that are not there yet."""
    of: int
    """Those of a step."""
    num_engines: int
    """Of a pool of one engine nothing moves."""


class ClusterBoard(NamedTuple):
    """One look at a cluster."""

    name: str
    book: Book
    lines: dict[str, PermitLine]
    """Holder and queue of each pool's permit."""
    events: dict[str, list[PermitEvent]]
    steps: dict[str, int]
    """Finished, by job."""
    left: dict[str, RolloutLeft]
    """Of jobs that generate."""
    now_s: float
    """Wall clock, in seconds."""

    def table(self) -> str:
        """Pools, groups, costs and jobs."""
        return "\n".join([self._head(), *self._groups(), *self.pools(), "", self.jobs(), "", *self.gantt()]).rstrip()

    def _head(self) -> str:
        book, section = self.book, self.book.section
        shared, solo = book.usd_hour(), book.usd_hour_solo()
        cost = f"{shared:.2f} $/h, {solo:.2f} if each had its own" if solo else "no job runs"
        return f"cluster {self.name} · rollout {section.rollout.nodes}, training {section.training.nodes} nodes · {cost}"

    def pools(self) -> list[str]:
        """A line for each pool that a job has asked for: its holder, and the jobs that wait for it, first come first."""
        if not self.lines:
            return []
        rows = [f" {'pool':<12} {'held by':<28} queue"]
        for pool, line in sorted(self.lines.items()):
            held = [f"{each.job} {self.now_s - each.since_s:.1f} s" for each in (line.holder,) if each is not None]
            held += [f"{line.tail.job}'s tail"] if line.tail is not None else []
            queue = [f"{each.job} {self.now_s - each.since_s:.1f} s" for each in line.queue]
            rows.append(f" {pool:<12} {', '.join(held) or '–':<28} {', '.join(queue) or '–'}")
        return ["", *rows]

    def _groups(self) -> list[str]:
        return [
            f"group {group.number}: {', '.join(pinned.job.name for pinned in group.jobs)} on rollout "
            f"{', '.join(map(str, group.nodes))} · {group.usd_hour(self.book.cluster):.2f} $/h"
            for group in self.book.groups()
        ]

    def jobs(self) -> str:
        """A line for each job, those that are over last."""
        order = sorted(self.book.jobs.values(), key=lambda job: (job.over, job.number))
        if not order:
            return "no jobs. Submit one with: rubato submit JOB.yaml --cluster DIR"
        width = max(len(job.name) for job in order)
        rows = [f" {'job':<{width}}  group  {'step':>5}  {'state':<10} {'holds':<22} slowdown  slack  promised  so far  why"]
        return "\n".join([*rows, *(self._row(job, width) for job in order)])

    def _row(self, job: JobRecord, width: int) -> str:
        slow = f"{job.slowdown:.2f}" if job.slowdowns and job.holds else "–"
        slack = _slack(job)
        group = str(job.group) if job.holds else "–"
        waits = self.why(job.name)
        return (
            f" {job.name:<{width}}  {group:>5}  {self.steps.get(job.name, job.step):>5}  {job.state:<10} {self._holds(job.name):<22} "
            f"{slow:>8}  {'–' if slack is None else f'{slack:.2f}':>5}  {f'{job.slo:g}' if job.times else 'trial':>8}  "
            f"{f'{job.kept:.2f}' if job.kept else '–':>6}  {waits or job.why}"
        )

    def _holds(self, name: str) -> str:
        held = [
            f"{pool} {self.now_s - line.holder.since_s:.1f} s"
            for pool, line in sorted(self.lines.items())
            if line.holder is not None and line.holder.job == name
        ]
        return ", ".join(held) or "–"

    def why(self, name: str) -> str:
        """What the job stands in line for, if it does."""
        for pool, line in sorted(self.lines.items()):
            ahead = [each for each in (line.holder, *line.queue) if each is not None]
            waiting = next((each for each in line.queue if each.job == name), None)
            if waiting is None or line.holder is None:
                continue
            before = [each.job for each in ahead[1 : ahead.index(waiting)]]
            then = f"; {', '.join(before)} before it" if before else ""
            return (
                f"waits {self.now_s - waiting.since_s:.1f} s for {pool}: {line.holder.job} holds it "
                f"for {line.holder.phase} since {self.now_s - line.holder.since_s:.1f} s{self._left(line)}{then}"
            )
        return ""

    def _left(self, line: PermitLine) -> str:
        """How far the pool's holder is, and when the rest of it makes room."""
        holder = line.holder
        left = self.left.get(holder.job) if holder is not None and holder.phase == ROLLOUT else None
        if left is None or not left.of:
            return ""
        if left.num_engines < 2:
            moves = ""
        elif line.tail is None:
            moves = f", moves at {1 - TAIL:.0%}".replace("%", " %")
        else:
            moves = f", moves at {1 - TAIL:.0%} once the tail of {line.tail.job} is over".replace("%", " %")
        return f", {left.num} of {left.of} responses left{moves}"

    def data(self) -> dict[str, object]:
        """The same for a program."""
        book = self.book
        return {
            "cluster": self.name,
            "usd_hour": book.usd_hour(),
            "usd_hour_solo": book.usd_hour_solo(),
            "groups": [
                {"group": each.number, "nodes": each.nodes, "jobs": [pinned.job.name for pinned in each.jobs]}
                for each in book.groups()
            ],
            "permits": {pool: msgspec.to_builtins(line) for pool, line in sorted(self.lines.items())},
            "jobs": [
                {
                    "name": job.name, "state": job.state, "group": job.group, "node": job.node, "slo": job.slo,
                    "slowdown": job.slowdown, "slack": _slack(job),
                    "promised": job.slo if job.times else None, "kept": job.kept or None, "step": self.steps.get(job.name, job.step), "why": self.why(job.name) or job.why,
                }
                for job in sorted(book.jobs.values(), key=lambda job: job.number)
            ],
        }  # fmt: skip

    def whys(self) -> str:
        """What waits for what, across jobs."""
        live = [job for job in self.book.jobs.values() if not job.over]
        waits = [(job, self.why(job.name)) for job in live]
        told = [f"job {job.name} {why}" if why else job.why for job, why in waits if why or job.state == "queued"]
        return "\n".join(told) or "nothing waits"

    def gantt(self, width: int = 60) -> list[str]:
        """Who held each pool over the last minute, a letter for each job."""
        held = {pool: held_times(events, self.now_s) for pool, events in sorted(self.events.items())}
        held = {pool: times for pool, times in held.items() if any(job in self.book.jobs for job, *_ in times)}
        names = sorted({job for times in held.values() for job, *_ in times})
        if not names:
            return []
        marks = {name: MARKS[index % len(MARKS)] for index, name in enumerate(names)}
        began = self.now_s - GANTT_CYCLES_S
        rows = [f" last {GANTT_CYCLES_S:.0f} s  " + "  ".join(f"{mark} {name}" for name, mark in marks.items())]
        label = max(map(len, held))
        for pool, times in held.items():
            cells = [" "] * width
            for job, start, end in times:
                first, last = ((at - began) / GANTT_CYCLES_S * width for at in (start, end))
                for cell in range(max(0, int(first)), min(width, max(int(first) + 1, round(last)))):
                    cells[cell] = marks[job]
            rows.append(f" {pool:<{label}} ▐{''.join(cells)}▌")
        return rows


def _slack(job: JobRecord) -> float | None:
    """What is left of its bound; None where it has no place, or no step has been seen there."""
    return job.slo - job.slowdown if job.slowdowns and job.holds else None


class HeldTime(NamedTuple):
    """A job had a pool's permit for so long."""

    job: str
    began_s: float
    ended_s: float


def held_times(events: list[PermitEvent], now_s: float) -> list[HeldTime]:
    """Each time that the pool of `events` was held; what still is lasts until `now_s`."""
    open_at: dict[int, PermitEvent] = {}
    found: list[HeldTime] = []
    for event in events:
        if event.kind == "holds":
            open_at[event.stand.ticket] = event
        elif event.kind == "gone" and (began := open_at.pop(event.stand.ticket, None)):
            found.append(HeldTime(event.stand.job, began.at_s, event.at_s))
    return [*found, *(HeldTime(each.stand.job, each.at_s, now_s) for each in open_at.values())]


async def read_board(folder: Path) -> ClusterBoard:
    """The cluster in `folder` now. Raises LaunchError where none is up there."""
    read_card(folder)
    if not is_held(folder):
        raise LaunchError(f"the cluster in {folder} is down. Start it again with: rubato cluster start {folder}")
    config = load(folder / "config.yaml")
    async with connect(folder, types=False) as connection:
        values = (await connection.store.scan("jobs/")).values()
    records = [msgspec.msgpack.decode(value, type=JobRecord) for value in values]
    shared = open_shared(folder)
    try:
        permits = Permits(shared)
        lines = await permits.lines()
        events = {pool: [event for _, event in await permits.events(pool)] for pool in lines}
    finally:
        await shared.close()
    steps = {record.name: _step(folder / "jobs" / record.name) for record in records}
    holders = {line.holder.job for line in lines.values() if line.holder is not None and line.holder.phase == "rollout"}
    left = {job: await _left(folder / "jobs" / job) for job in holders if (folder / "jobs" / job).is_dir()}
    book = Book(config.section("scheduler"), records)
    return ClusterBoard(config.run.name, book, lines, events, steps, left, wall_s())


async def _left(job: Path) -> RolloutLeft:
    """Of the job in that run folder."""
    config = read_config(job / "config.yaml")
    of = (lookup(config, "train.batch_groups") or 0) * (lookup(config, "train.group_size") or 0)
    try:
        source = RunSource(job)
    except LaunchError:
        return RolloutLeft(0, 0, 0)
    try:
        num = total((await source.read()).shown, "rollout/in_flight") or 0
        return RolloutLeft(int(num), int(of), int(lookup(config, "actors.engine.count") or 1))
    finally:
        await source.close()


def _step(folder: Path) -> int:
    rows = RowTail(folder / "metrics.jsonl").read()
    return int(rows[-1].get("step", 0)) if rows else 0
