"""Who holds tickets: takes them back from holders that left or fell silent, and says for the monitor who keeps a caller waiting."""

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from actors.samples.group import Barren, Group
from actors.samples.groups import Groups
from planning.staleness import HandOver

if TYPE_CHECKING:
    from structlog.typing import FilteringBoundLogger

    from runtime.observe.figures import Metrics

ON_THE_WAY_S = 3.0
"""A ticket may be on its way to its holder for this long."""

NOBODY = 2**63
"""Above every incarnation."""

ENV_MANAGER, TRAINER = "env_manager", "trainer"


@dataclass(eq=False)
class Holders:
    """Who holds tickets, by name and incarnation."""

    groups: Groups
    alive: Callable[[str], Awaitable[int]]
    """Tells the incarnation that a name has now; NOBODY where none."""
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
        """False for one that left, though it still asks: what it was given then would be held by nobody."""
        return incarnation > self._gone.get(holder, 0)

    def joined(self, holder: str) -> None:
        """It is seen, or seen again."""
        if self._gone.pop(holder, None) is not None:
            self.changed()

    def renew(self, holder: str, incarnation: int, held: Sequence[tuple[str, int]]) -> None:
        """Renew what `holder` runs, and cancel what it runs in vain. What it was given and does not know of was lost on the way."""
        now = asyncio.get_running_loop().time()
        for trajectory, attempt in held:
            self.groups.renew(trajectory, attempt, now)
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
            below = await self.alive(holder) if is_back else NOBODY
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
    held = f"at {', '.join(holders)}" if holders else "whose tickets nobody took yet"
    size = len(oldest.members)
    detail = f"{plan.why}; oldest group {oldest.id} has {oldest.num_settled} of {size} members, the rest {held}"
    return detail, holders[0] if holders else ENV_MANAGER


def why_no_tickets(groups: Groups) -> tuple[str, str]:
    """What fills the slots, and who frees the next one: the trainer where a batch is ready, else who runs the oldest group."""
    admission, oldest = groups.admission(), next(groups.open(), None)
    if oldest is None or sum(1 for _ in groups.ready()) >= groups.limits.batch_groups:
        return admission.why, TRAINER
    return f"{admission.why}; oldest group {oldest.id}", next(iter(_holders(oldest)), ENV_MANAGER)


def why_unfinished(group: Group) -> tuple[str, str]:
    """How far a held-out evaluation is."""
    detail = f"{group.num_settled} of {len(group.members)} held-out rollouts of {group.id}"
    return detail, next(iter(_holders(group)), ENV_MANAGER)


def why_barren(barren: Barren) -> str:
    """What became of groups that came to nothing one after another, and what to do about it."""
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
