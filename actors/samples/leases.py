"""Leases of tickets: taken back from holders that left or fell silent, kept from those whose environments fail, cancelled where in vain."""

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rubato.actors.messages.samples import Cancel, Ticket
from rubato.actors.samples.group import Barren, Group
from rubato.actors.samples.groups import Groups
from rubato.actors.samples.journal import Wake
from rubato.bus.errors import AskFailed
from rubato.planning.failures import STREAK, QuarantineView, quarantine
from rubato.planning.staleness import HandOver
from rubato.runtime.courier import Ref

if TYPE_CHECKING:
    from structlog.typing import FilteringBoundLogger

    from rubato.runtime.observe.figures import Metrics


ON_THE_WAY_S = 3.0
"""A ticket may be on its way to its holder for this long."""

NO_LEASE = 2**63
"""Above every incarnation."""

ENV_MANAGER, TRAINER = "env_manager", "trainer"


@dataclass(eq=False)
class Holders:
    """Holders of tickets, by name and incarnation."""

    groups: Groups
    alive: Callable[[str], Awaitable[int]]
    """The incarnation that a name has now; NO_LEASE where none."""
    drains: Callable[[str], Awaitable[bool]]
    """Whether who left did so because it was asked to, and is there still."""
    changed: Callable[[], None]
    """Called after rollouts were taken back, or are to be cancelled."""
    log: "FilteringBoundLogger"

    def __post_init__(self) -> None:
        self._newest: dict[str, int] = {}
        self._gone: dict[str, int] = {}
        """The newest incarnations of those that left."""
        self._granted = asyncio.Event()

    def granted(self) -> None:
        """Tickets were issued or renewed: their leases run."""
        self._granted.set()

    def asked(self, holder: str, incarnation: int) -> None:
        """Note an asker's incarnation: what an older one holds is lost."""
        if incarnation > self._newest.get(holder, 0):
            self._newest[holder] = incarnation
            self._left(holder, incarnation)

    def may_have(self, holder: str, incarnation: int) -> bool:
        """Whether a holder may have tickets: not one that left, though it still asks; a ticket given to it then would be lost."""
        return incarnation > self._gone.get(holder, 0)

    def joined(self, holder: str) -> None:
        """It is seen, or seen again."""
        if self._gone.pop(holder, None) is not None:
            self.changed()

    def renew(self, holder: str, incarnation: int, held: Sequence[tuple[str, int]]) -> None:
        """Renew what `holder` runs, and cancel what it runs in vain. What it was given and does not know of was lost on the way."""
        now = asyncio.get_running_loop().time()
        for trajectory, attempt in held:
            self.groups.renew(trajectory, attempt, now, holder, incarnation)
        self.granted()
        if in_vain := [each for each in held if not self.groups.wants(*each)]:
            self.groups.cancels.setdefault((holder, incarnation), []).extend(in_vain)
            self.changed()
        known = {trajectory for trajectory, _ in held}
        mine = [n for n, m in self.groups.running() if m.holder == holder and m.incarnation == incarnation]
        granted_before = now + self.groups.limits.ticket_ttl_s - ON_THE_WAY_S
        leases = self.groups.leases
        lost = [name for name in mine if name not in known and leases.get(name, math.inf) <= granted_before]
        self._take_back(lost, "lost_on_the_way", counted=False)

    async def left(self, holder: str, *, is_back: bool) -> None:
        """`holder` went away; where it is back, only what its former incarnations held is taken back. A drain costs its rollouts no try."""
        if not is_back:
            self._gone[holder] = self._newest.get(holder, 0)
        if any(member.holder == holder for _, member in self.groups.running()):
            below = await self.alive(holder) if is_back else NO_LEASE
            self._left(holder, below, counted=is_back or not await self.drains(holder))

    async def check_all(self) -> None:
        """After a restart: take back what is held by incarnations that are in the run no more."""
        for holder in sorted({member.holder for _, member in self.groups.running()}):
            await self.left(holder, is_back=True)

    async def watch_leases(self) -> None:
        """Wake when the earliest lease may lapse, until cancelled. A renewed one merely makes that early."""
        loop = asyncio.get_running_loop()
        while True:
            earliest = min(self.groups.leases.values(), default=None)
            if earliest is None:
                self._granted.clear()
                await self._granted.wait()
                continue
            await asyncio.sleep(max(0.0, earliest - loop.time()))
            now = loop.time()
            self._take_back(sorted(n for n, lapses in self.groups.leases.items() if lapses <= now), "lease_lapsed")

    def _left(self, holder: str, below: int, *, counted: bool = True) -> None:
        gone = [n for n, m in self.groups.running() if m.holder == holder and m.incarnation < below]
        self._take_back(gone, "holder_left", counted=counted)

    def _take_back(self, rollouts: Sequence[str], reason: str, *, counted: bool = True) -> None:
        if not rollouts:
            return
        self.log.warning("tickets_taken_back", reason=reason, num=len(rollouts), first=rollouts[0])
        for name in rollouts:
            self.groups.take_back(name, reason, counted=counted)
            self.groups.leases.pop(name, None)
        self.changed()


# -- what callers wait for: (detail, holder) each ------------------------------------------------------------------


def why_no_batch(groups: Groups, plan: HandOver) -> tuple[str, str]:
    """How many groups there are, which is the oldest that runs, and who holds it."""
    oldest = next(groups.open(), None)
    if oldest is None:
        admission = groups.admission()
        return f"{plan.why}; none runs: {admission.why}", ENV_MANAGER if admission.num_groups else ""
    holders = _holders(oldest)
    held = f"at {', '.join(holders)}" if holders else "whose tickets no env_manager has taken"
    size = len(oldest.members)
    detail = f"{plan.why}; oldest group {oldest.id} has {oldest.num_settled} of {size} members, the rest {held}"
    return detail, holders[0] if holders else ENV_MANAGER


def why_no_tickets(groups: Groups) -> tuple[str, str]:
    """Filling of the slots, and the actor that frees the next one: the trainer where a batch is ready, else the oldest group's holder."""
    admission, oldest = groups.admission(), next(groups.open(), None)
    if oldest is None or sum(1 for _ in groups.ready()) >= groups.limits.batch_groups:
        return admission.why, TRAINER
    return f"{admission.why}; oldest group {oldest.id}", next(iter(_holders(oldest)), ENV_MANAGER)


def why_unfinished(group: Group) -> tuple[str, str]:
    """How far a held-out evaluation is."""
    detail = f"{group.num_settled} of {len(group.members)} held-out rollouts of {group.id}"
    return detail, next(iter(_holders(group)), ENV_MANAGER)


def why_barren(barren: Barren) -> str:
    """Fates of groups that came to nothing one after another, and what to do about it."""
    num, small = barren.in_a_row, barren.too_small
    failed = ", ".join(f"{reason} {n:,}" for reason, n in sorted(barren.reasons.items(), key=lambda pair: -pair[1]))
    few = f"had fewer than two rollouts with a reward (failed: {failed})"
    mend = "Read what failed: rubato samples RUN --fate failed."
    if not small:
        return f"{num} groups in a row {barren.why}"
    if small == num:
        return f"{num} groups in a row {few}, and a group of one has nothing to be compared with. {mend}"
    return f"{num} groups in a row came to nothing: {small} {few}, {num - small} {barren.why} {mend}"


def gauges(groups: Groups, metrics: "Metrics") -> None:
    """Depths in samples: held in groups that still run, ready to be claimed, bound to a step not trained yet. And what became of all tokens."""
    for queue, state in (("held", "open"), ("ready", "ready"), ("bound", "bound")):
        depth = sum(group.num_scored for group in groups.live.values() if group.state == state)
        metrics.gauge(f"queue/{queue}/depth", depth)
    metrics.gauge("groups/ready", sum(1 for _ in groups.ready()))
    metrics.gauge("groups/in_flight", sum(1 for _ in groups.open()))
    held = sum(sum(group.held_tokens) for group in groups.live.values())
    trained = [(tokens, group.task) for group in groups.trained.values() for tokens in group.held_tokens]
    for name, value in groups.training.tally.figures(held + sum(tokens for tokens, _ in trained), trained):
        metrics.gauge(name, value)


def _holders(group: Group) -> list[str]:
    return sorted({member.holder for member in group.members if member.state == "running"})


ENV_REASONS = frozenset({"env_reset_failed", "env_step_failed", "env_timeout", "env_bad_result", "env_lost", "no_worker"})
"""Why a rollout ended that ended in its environment."""


@dataclass(eq=False, slots=True)
class HolderRecord:
    """How one environment manager fares, in one life of its."""

    incarnation: int
    got_through: bool = False
    """Some rollout of its did."""
    failed: set[str] = field(default_factory=set)
    """Groups of which a rollout failed in its environment since."""
    pauses: int = 0
    """Since then."""
    until: float = 0.0
    """Loop time at which the newest pause ends."""
    why: str = ""
    trial: tuple[str, int] = ("", 0)
    """Trajectory and attempt of the one ticket that it gets after a pause."""

    def begun_before(self, ticket: Ticket) -> bool:
        """Whether there was a pause since, so that it says nothing about now."""
        return self.pauses > 0 and (ticket.trajectory_id, ticket.attempt) != self.trial

    @property
    def does_well(self) -> bool:
        return self.got_through and not self.pauses and len(self.failed) < STREAK


@dataclass(eq=False)
class HolderRecords:
    """How the holders of tickets fare beside each other."""

    groups: Groups
    present: Callable[[], Sequence[str]]
    """The environment managers that are ready."""
    tell: Callable[[str], None]
    """Shows the user a sentence."""

    def __post_init__(self) -> None:
        self._records: dict[str, HolderRecord] = {}

    def holder_of(self, ticket: Ticket) -> str:
        """The holder that runs it; empty where it should not run."""
        found = self.groups.find(ticket.trajectory_id)
        return found[1].holder if found is not None and self.groups.wants(ticket.trajectory_id, ticket.attempt) else ""

    def good(self, ticket: Ticket) -> None:
        """It got through its environment."""
        holder, record = self._find(ticket)
        if record is None or record.begun_before(ticket):
            return
        if record.pauses:
            self.tell(f"{holder} gets tickets again: a rollout got through its environment")
        self._records[holder] = HolderRecord(record.incarnation, got_through=True)

    def bad(self, ticket: Ticket, reason: str) -> None:
        """It ended for `reason`; the first pause is a notice."""
        holder, record = self._find(ticket)
        if record is None or reason not in ENV_REASONS or record.begun_before(ticket):
            return
        if len(record.failed) < STREAK:
            record.failed.add(ticket.group_id)
        others_good = any(name != holder and self._does_well(name) for name in self.present())
        plan = quarantine(QuarantineView(len(record.failed), others_good, record.pauses))
        if not plan.pause_s:
            return
        record.failed.clear()
        record.pauses, record.why, record.until = record.pauses + 1, plan.why, self._now() + plan.pause_s
        if record.pauses == 1:
            again = f"it is tried again in {plan.pause_s:g} s, and ever more rarely while it fails"
            self.tell(f"{holder} is set aside: {plan.why} ({reason} lastly); {again}")

    def is_aside(self, holder: str) -> bool:
        """Whether it gets one ticket after a pause at most. A manager is not set aside where no other is there to do the work."""
        return self._paused(holder) and any(name != holder and not self._paused(name) for name in self.present())

    def allowed(self, holder: str, incarnation: int, num: int) -> int:
        """How many of `num` tickets it may get now. A new incarnation begins anew."""
        record = self._records.get(holder)
        if record is None or record.incarnation < incarnation:
            here = self.present()
            self._records = {name: each for name, each in self._records.items() if name in here}
            record = self._records[holder] = HolderRecord(incarnation)
        if not self.is_aside(holder):
            return num
        return 0 if self._now() < record.until or self.groups.wants(*record.trial) else min(num, 1)

    def issued(self, holder: str, tickets: Sequence[Ticket]) -> None:
        """It got these: after a pause, the one that it is tried with."""
        record = self._records.get(holder)
        if record is not None and record.pauses and tickets:
            record.trial = (tickets[0].trajectory_id, tickets[0].attempt)

    def why(self, holder: str) -> str:
        """Reason why a holder that is set aside gets no tickets."""
        record = self._records.get(holder)
        if record is None:
            return f"{holder} gets tickets again"
        return f"{holder} is set aside, {max(0.0, record.until - self._now()):.0f} s more: {record.why}"

    def _paused(self, holder: str) -> bool:
        record = self._records.get(holder)
        return record is not None and record.pauses > 0

    def _does_well(self, holder: str) -> bool:
        record = self._records.get(holder)
        return record is not None and record.does_well

    def _find(self, ticket: Ticket) -> tuple[str, HolderRecord | None]:
        """Its holder, with its record in the life that got the ticket. After a restart of the sample buffer records begin with this."""
        found = self.groups.find(ticket.trajectory_id)
        if found is None or not self.groups.wants(ticket.trajectory_id, ticket.attempt):
            return "", None
        member = found[1]
        record = self._records.setdefault(member.holder, HolderRecord(member.incarnation))
        return member.holder, record if record.incarnation == member.incarnation else None

    def _now(self) -> float:
        return asyncio.get_running_loop().time()


TELL_S = 1.0
"""A holder that grants no credit for this long hears of it at its next renewal."""


@dataclass(eq=False)
class Cancels:
    """Sender of the cancels that `groups.cancels` gathers, whenever `changed` wakes."""

    groups: Groups
    changed: Wake
    issuer: int
    """The sample buffer's incarnation."""
    ref: Callable[[str], Ref]

    async def follow(self) -> None:
        """Send them as they come, until cancelled."""
        while True:
            changed = self.changed.event
            for (holder, incarnation), rollouts in self.groups.take_cancels().items():
                with suppress(AskFailed, TimeoutError):
                    async with asyncio.timeout(TELL_S):
                        await self.ref(holder).tell(Cancel(tuple(rollouts), incarnation, self.issuer))
            await changed.wait()
