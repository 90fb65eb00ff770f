"""Sets environment managers aside whose environments fail again and again while those of others do not: such a one would take a ticket
after the other, and fail them all. Kept in memory alone: whoever still fails after a restart is found again.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from actors.messages.samples import Ticket
from actors.samples.groups import Groups
from planning.quarantine import STREAK, QuarantineView, quarantine

ENV_REASONS = frozenset(
    {"env_reset_failed", "env_step_failed", "env_timeout", "env_bad_result", "env_lost", "no_worker"}
)
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
        """Who runs it; empty where nobody should."""
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
        """It ended for `reason`; the first pause is told."""
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
        """Whether it gets one ticket after a pause at most. Nobody is set aside where nobody else is there to do the work."""
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
        """What keeps tickets from one that is set aside."""
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
        """Who runs it, and its record in the life that got the ticket. After a restart of the sample buffer records begin with this."""
        found = self.groups.find(ticket.trajectory_id)
        if found is None or not self.groups.wants(ticket.trajectory_id, ticket.attempt):
            return "", None
        member = found[1]
        record = self._records.setdefault(member.holder, HolderRecord(member.incarnation))
        return member.holder, record if record.incarnation == member.incarnation else None

    def _now(self) -> float:
        return asyncio.get_running_loop().time()
