"""Takes tickets back from holders that left or fell silent, so that their rollouts are issued again."""

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from actors.samples.book import Book
from actors.samples.intake import Intake
from actors.samples.journal import Journal
from runtime.store.store import Store

if TYPE_CHECKING:
    from structlog.typing import FilteringBoundLogger

ON_THE_WAY_S = 3.0
"""A ticket may be on its way to its holder for this long."""

NOBODY = 2**63
"""Above every incarnation."""


class Holders:
    """Who holds tickets, by name and incarnation."""

    def __init__(self, book: Book, intake: Intake, journal: Journal, store: Store, log: "FilteringBoundLogger") -> None:
        self._book = book
        self._intake = intake
        self._journal = journal
        self._store = store
        self._log = log
        self._newest: dict[str, int] = {}
        self._granted = asyncio.Event()

    def granted(self) -> None:
        """Tickets were issued: their leases run."""
        self._granted.set()

    def replaced(self, holder: str, incarnation: int) -> bool:
        """Note an asker's incarnation; True when an older one, which is gone then, holds tickets."""
        if incarnation <= self._newest.get(holder, 0):
            return False
        self._newest[holder] = incarnation
        return any(taken_by < incarnation for _, taken_by in self._book.held_by(holder))

    async def hold(self, holder: str, held: Sequence[tuple[str, int]]) -> None:
        """Renew what `holder` runs. What it was given and does not know of was lost on the way, with the buffer or a link."""
        now = asyncio.get_running_loop().time()
        for trajectory, attempt in held:
            self._book.renew(trajectory, attempt, now)
        self._granted.set()
        known = {trajectory for trajectory, _ in held}
        astray = [name for name, _ in self._book.held_by(holder) if name not in known]
        astray = [name for name in astray if self._book.leases.age(name, now) >= ON_THE_WAY_S]
        if astray:
            self._log.warning("tickets_astray", holder=holder, rollouts=len(astray))
            await self._intake.retry_or_end(astray, "ticket_astray", counted=False)

    async def check_all(self) -> None:
        """After a restart: take back what is held by incarnations that are in the run no more."""
        for holder in self._book.holders():
            await self.left(holder, ready=True)

    async def watch_leases(self) -> None:
        """Wake when the earliest lease may lapse, until cancelled. A renewed one merely makes that early."""
        loop = asyncio.get_running_loop()
        while True:
            earliest = self._book.leases.earliest()
            if earliest is None:
                self._granted.clear()
                await self._granted.wait()
                continue
            await asyncio.sleep(max(0.0, earliest - loop.time()))
            lapsed = self._book.leases.lapsed(loop.time())
            if lapsed:
                self._log.warning("tickets_lapsed", num=len(lapsed), first=lapsed[0])
                await self._intake.retry_or_end(lapsed, "lease_lapsed")

    async def left(self, holder: str, *, ready: bool) -> None:
        """`holder` went away; where it is `ready` again, only what its former incarnations held is taken back."""
        if not self._book.held_by(holder):
            return
        alive = NOBODY
        if ready:
            name = f"actor/{holder}"
            lease = (await self._journal.steadily(partial(self._store.leases, name))).get(name)
            alive = lease.token if lease is not None else NOBODY
        await self.take_back(holder, alive)

    async def take_back(self, holder: str, below: int) -> None:
        """Issue again what incarnations of `holder` lower than `below` hold."""
        gone = [name for name, taken_by in self._book.held_by(holder) if taken_by < below]
        if gone:
            self._log.warning("holder_left", holder=holder, rollouts=len(gone))
            await self._intake.retry_or_end(gone, "holder_left")
