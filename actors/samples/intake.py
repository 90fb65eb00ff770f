"""Takes in what became of rollouts and ends groups: what is acknowledged is durable, and every sample gets exactly one fate.

The order of writes makes that true. A member's record says `putting` before its sample is put, so a restart knows what to
look for; a group's record names its fate before its samples are ended, so a restart ends the rest.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Protocol

import msgspec

from actors.messages.rewards import flaw_of
from actors.messages.samples import GiveUp, Trajectory
from actors.samples.book import Book
from actors.samples.groups import Group, Member
from actors.samples.journal import Journal
from actors.samples.sample import INLINE_BYTES, note_of, trajectory_id
from actors.samples.wake import Wake
from planning.staleness import is_stale
from runtime.store.workset import Item, WorkSet

if TYPE_CHECKING:
    from structlog.typing import FilteringBoundLogger

    from runtime.observe.metrics import Metrics


class FilePayload(Protocol):
    """Keeps a payload that is too large for the Store; returns what stands for it."""

    async def __call__(self, name: str, payload: bytes) -> bytes: ...


@dataclass
class Wakes:
    """Who is woken by what."""

    slots: Wake = field(default_factory=Wake)
    """Something may be admitted."""
    supply: Wake = field(default_factory=Wake)
    """A batch may have become claimable."""
    ended: Wake = field(default_factory=Wake)
    """Samples ended: the ledger has lines to write."""
    rounds: Wake = field(default_factory=Wake)
    """A held-out task has its outcome."""


class Intake:
    """Its methods must run to their end once begun, or the process with them: a cancelled caller leaves them running."""

    def __init__(
        self,
        book: Book,
        journal: Journal,
        workset: WorkSet,
        wakes: Wakes,
        file_payload: FilePayload,
        metrics: "Metrics",
        log: "FilteringBoundLogger",
    ) -> None:
        self._book = book
        self._journal = journal
        self._workset = workset
        self._wakes = wakes
        self._file_payload = file_payload
        self._metrics = metrics
        self._log = log

    async def put(self, trajectory: Trajectory) -> str:
        """Store a scored trajectory; returns its fate so far ("" while it may train)."""
        ticket = trajectory.ticket
        found = self._book.find(ticket.trajectory_id)
        if found is None:
            return self._refused(self._book.closed_fate(ticket))
        group, member = found
        if ticket.attempt != member.attempt:
            return self._refused("superseded")
        if member.settled or group.fate:
            await self._journal.flush()
            return group.fate_of(member)
        if flaw := flaw_of(trajectory.reward):
            return await self.end(group, ticket.trajectory_id, "failed", f"reward_{flaw}")
        if group.purpose == "eval":
            self._settle_eval(member, ticket.trajectory_id, trajectory.reward)
            return ""
        member.version_first, member.reward = trajectory.version_first, trajectory.reward
        if is_stale(trajectory.version_first, self._book.base, self._book.alpha):
            return await self.end(group, ticket.trajectory_id, "stale", note=note_of(trajectory))
        return await self._store(group, member, trajectory)

    async def give_up(self, request: GiveUp) -> str:
        """A rollout ended without a score: another attempt, or its end."""
        ticket = request.ticket
        found = self._book.find(ticket.trajectory_id)
        if found is None:
            return self._refused(self._book.closed_fate(ticket))
        group, member = found
        if ticket.attempt != member.attempt:
            return self._refused("superseded")
        if member.settled or member.state == "putting" or group.fate:
            await self._journal.flush()
            return group.fate_of(member)
        if request.retry and await self.retry(ticket.trajectory_id, counted=request.reason != "drained"):
            return ""
        fate = "stale" if request.reason == "stale" else "failed"
        return await self.end(group, ticket.trajectory_id, fate, request.reason)

    def _refused(self, fate: str) -> str:
        """Count what came with the ticket of an attempt that another one replaced."""
        if fate == "superseded":
            self._metrics.count("tickets/refused")
        return fate

    async def retry(self, trajectory: str, *, counted: bool) -> bool:
        """Issue a running rollout again; False when its attempts are used up."""
        if not self._book.take_back(trajectory, counted=counted):
            return False
        self._wakes.slots.set()
        await self._journal.flush()
        return True

    async def retry_or_end(self, trajectories: Sequence[str], reason: str, *, counted: bool = True) -> None:
        """Their holder is gone or silent."""
        spent = [name for name in trajectories if not self._book.take_back(name, counted=counted)]
        self._wakes.slots.set()
        await self._journal.flush()
        for name in spent:
            found = self._book.find(name)
            if found is not None and found[1].state == "running":
                await self.end(found[0], name, "failed", reason)

    async def end(self, group: Group, trajectory: str, fate: str, reason: str = "", note: bytes = b"") -> str:
        """End one member without a stored sample."""
        _, member = self._book.find(trajectory) or (group, Member())
        member.state, member.fate, member.reason = "failed", fate, reason
        self._book.leases.release(trajectory)
        if group.purpose == "eval":
            self._wakes.rounds.set()
            return fate
        self._book.changed(group.id)
        await self._journal.flush()
        await self.log_end(group, trajectory, member, note)
        if group.complete:
            await self.complete(group)
        return fate

    async def log_end(self, group: Group, trajectory: str, member: Member, note: bytes = b"") -> None:
        """Write a member's end into the WorkSet, once however often it is asked; nothing happens to a sample that is held."""
        fate = member.fate or group.fate
        note = note or group.note(member)
        if await self._journal.steadily(partial(self._workset.end, trajectory, group.id, fate, note)):
            self._count_ended(fate, 1)
            self._wakes.ended.set()

    async def complete(self, group: Group) -> None:
        """Every member has its outcome: make the group claimable, or end it."""
        if group.sealed or (group.fate and not group.trainable):
            return
        if (fate := group.verdict()) == "group_too_small":
            await self.discard(group, fate)
            return
        group.fate = fate
        sealed = await self._journal.steadily(partial(self._workset.seal, group.id, fate, group.num_scored))
        is_missing = not sealed and await self._missing(group)
        if group.fate != fate:  # it was ended meanwhile, by its age or the job's close
            return
        if is_missing:
            group.fate = ""
            return
        group.sealed = True
        self._book.changed(group.id)
        if group.num_scored < len(group.members):
            self._metrics.count("groups/shrunk")
        self._wakes.supply.set()

    async def seal_again(self, group: Group) -> None:
        """The WorkSet may have forgotten that the group is sealed, or some of its samples."""
        if group.sealed and group.trainable and not group.step:
            group.sealed, group.fate = False, ""
            await self.complete(group)

    async def discard(self, group: Group, fate: str) -> None:
        """End a group that will not train, with all that is held of it and all that still runs. Where it is being ended already, its first fate stands.

        What is held goes last: a sample that comes meanwhile is known to have ended, or goes with the others.
        """
        group.fate = fate = group.fate if group.fate and not group.trainable else fate
        self._book.changed(group.id)
        await self._journal.flush()
        for index, member in enumerate(group.members):
            await self.log_end(group, trajectory_id(group.id, index), member)
        num = await self._journal.steadily(partial(self._workset.discard, group.id, fate))
        self._count_ended(fate, num)
        self.forget(group)
        self._log.info("group_discarded", group=group.id, fate=fate, held=num)

    async def drop_old(self, oldest: int) -> None:
        """End the groups, running or ready, that hold a first token older than `oldest`: they would never train."""
        groups = [*(g for g in self._book.running() if not g.fate), *self._book.ready()]
        for group in groups:
            if group.version_known(self._book.base) < oldest and not group.step:
                await self.discard(group, "stale")

    async def end_unused(self) -> None:
        """The job is over: end whatever no step is bound to."""
        for group in [g for g in self._book.groups.values() if not g.step]:
            await self.discard(group, "unused")

    async def members(self, group: Group) -> tuple[str, ...]:
        """What the WorkSet holds of a group."""
        return await self._journal.steadily(partial(self._workset.members, group.id))

    async def lost(self, group: Group) -> None:
        """The WorkSet no longer knows a group that was acknowledged."""
        self._log.error(
            "group_lost", group=group.id, samples=group.num_scored, cause="the store lost its newest writes"
        )
        await self.discard(group, "lost")

    def dropped_as_stale(self, group: Group) -> int:
        """The WorkSet ended a ready group for its age; returns its number of samples."""
        group.fate = "stale"
        self._count_ended("stale", group.num_scored)
        self.forget(group)
        return group.num_scored

    def forget(self, group: Group) -> None:
        """The group is over: free its slot."""
        self._book.remove(group.id)
        self._wakes.slots.set()
        self._wakes.supply.set()
        self._wakes.ended.set()

    async def _missing(self, group: Group) -> bool:
        """Whether acknowledged samples are gone from the WorkSet, because the Store lost its newest writes: they are run again."""
        held = await self.members(group)
        if not group.trainable or group.id not in self._book.groups:
            return False
        missing = [
            name
            for index, member in enumerate(group.members)
            if member.state == "scored" and (name := trajectory_id(group.id, index)) not in held
        ]
        for name in missing:
            self._book.again(group, name)
        if missing:
            self._metrics.count("samples/lost_by_store", len(missing))
            self._log.error("samples_lost", group=group.id, samples=missing, cause="the store lost its newest writes")
            self._wakes.slots.set()
        return bool(missing)

    async def _store(self, group: Group, member: Member, trajectory: Trajectory) -> str:
        name = trajectory.ticket.trajectory_id
        payload = msgspec.msgpack.encode(trajectory)
        if len(payload) > INLINE_BYTES:
            payload = await self._file_payload(f"{name}.{trajectory.ticket.attempt}", payload)
        if member.attempt != trajectory.ticket.attempt:
            return self._refused("superseded")
        if member.settled or group.fate:
            return group.fate_of(member)
        member.state = "putting"
        self._book.leases.release(name)
        self._book.changed(group.id)
        await self._journal.flush()
        item = Item(name, group.id, trajectory.version_first, payload, note_of(trajectory))
        outcome = await self._journal.steadily(partial(self._workset.put, item))
        if outcome == "duplicate" and name not in await self.members(group):
            self._log.warning("group_ended_before", group=group.id, trajectory=name)
            group.fate = group.fate or "stale"
            self.forget(group)
        elif group.fate and not group.trainable:
            await self._journal.steadily(partial(self._workset.discard, group.id, group.fate))
            self._wakes.ended.set()
        elif member.state == "putting":
            member.state = "scored"
            self._metrics.count("samples/put")
            if group.complete:
                await self.complete(group)
        if member.state in ("pending", "running"):  # the Store lost it again, and it is run once more
            return self._refused("superseded")
        return group.fate_of(member)

    def _settle_eval(self, member: Member, trajectory: str, reward: float) -> None:
        member.state, member.reward = "scored", reward
        self._book.leases.release(trajectory)
        self._wakes.rounds.set()

    def _count_ended(self, fate: str, num: int) -> None:
        self._metrics.count(f"samples/{fate}", num)
        if fate == "stale":
            self._metrics.count("staleness/dropped", num)
