"""Takes tickets back from holders that left or fell silent, so that their rollouts are issued again."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING

from actors.samples.groups import Groups

if TYPE_CHECKING:
    from structlog.typing import FilteringBoundLogger

ON_THE_WAY_S = 3.0
"""A ticket may be on its way to its holder for this long."""

NEVER_S = 1e9
"""Beyond any lease."""

NOBODY = 2**63
"""Above every incarnation."""


class Holders:
    """Who holds tickets, by name and incarnation. `alive` tells the incarnation that a name has now (NOBODY: none);
    `taken_back` is called after rollouts were taken back."""

    def __init__(
        self,
        groups: Groups,
        alive: Callable[[str], Awaitable[int]],
        taken_back: Callable[[], None],
        log: "FilteringBoundLogger",
    ) -> None:
        self._groups = groups
        self._alive = alive
        self._taken_back = taken_back
        self._log = log
        self._newest: dict[str, int] = {}
        self._granted = asyncio.Event()

    def granted(self) -> None:
        """Tickets were issued or renewed: their leases run."""
        self._granted.set()

    def asked(self, holder: str, incarnation: int) -> None:
        """Note an asker's incarnation: what an older one holds is lost."""
        if incarnation > self._newest.get(holder, 0):
            self._newest[holder] = incarnation
            self._left(holder, incarnation)

    def renew(self, holder: str, incarnation: int, held: Sequence[tuple[str, int]]) -> None:
        """Renew what `holder` runs. What this incarnation was given and does not know of was lost on the way."""
        now = asyncio.get_running_loop().time()
        for trajectory, attempt in held:
            self._groups.renew(trajectory, attempt, now)
        self.granted()
        known = {trajectory for trajectory, _ in held}
        mine = [name for name, taken_by in self._groups.held_by(holder) if taken_by == incarnation]
        granted_before = now + self._groups.limits.ticket_ttl_s - ON_THE_WAY_S
        leases = self._groups.leases
        lost = [name for name in mine if name not in known and leases.get(name, now + NEVER_S) <= granted_before]
        self._take_back(lost, "lost_on_the_way", counted=False)

    async def left(self, holder: str, *, is_back: bool) -> None:
        """`holder` went away; where it is back, only what its former incarnations held is taken back."""
        if self._groups.held_by(holder):
            self._left(holder, await self._alive(holder) if is_back else NOBODY)

    async def check_all(self) -> None:
        """After a restart: take back what is held by incarnations that are in the run no more."""
        for holder in self._groups.holders():
            await self.left(holder, is_back=True)

    async def watch_leases(self) -> None:
        """Wake when the earliest lease may lapse, until cancelled. A renewed one merely makes that early."""
        loop = asyncio.get_running_loop()
        while True:
            earliest = min(self._groups.leases.values(), default=None)
            if earliest is None:
                self._granted.clear()
                await self._granted.wait()
                continue
            await asyncio.sleep(max(0.0, earliest - loop.time()))
            now = loop.time()
            self._take_back(sorted(n for n, lapses in self._groups.leases.items() if lapses <= now), "lease_lapsed")

    def _left(self, holder: str, below: int) -> None:
        gone = [name for name, taken_by in self._groups.held_by(holder) if taken_by < below]
        self._take_back(gone, "holder_left")

    def _take_back(self, rollouts: Sequence[str], reason: str, *, counted: bool = True) -> None:
        if not rollouts:
            return
        self._log.warning("tickets_taken_back", reason=reason, num=len(rollouts), first=rollouts[0])
        for name in rollouts:
            self._groups.take_back(name, reason, counted=counted)
            self._groups.leases.pop(name, None)
        self._taken_back()
