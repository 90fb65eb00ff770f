"""What is made again once a Store has forgotten its newest changes: records, ends, seals; and the groups that it lost."""

import asyncio
from functools import partial

from actors.samples.book import Book
from actors.samples.intake import Intake, Wakes
from actors.samples.journal import Journal
from actors.samples.recovery import Records
from actors.samples.sample import trajectory_id
from runtime.store.workset import WorkSet


class Repair:
    """Claims and commits are the trainer's to make again (actors/samples/handover.py); everything here changes nothing where it still stands."""

    def __init__(
        self, book: Book, journal: Journal, workset: WorkSet, wakes: Wakes, records: Records, intake: Intake
    ) -> None:
        self._book, self._journal, self._workset, self._wakes = book, journal, workset, wakes
        self._records, self._intake = records, intake
        self._turn = asyncio.Lock()
        self._due = False

    def ask(self) -> None:
        """The Store forgot, or may have."""
        self._due = True
        self._records.all_changed()

    async def run(self) -> None:
        """Return once everything that was asked for is made again."""
        async with self._turn:
            while self._due:
                self._due = False
                await self._journal.flush()
                await self._end_again()
                await self.find_lost()
                self._wakes.slots.set()
                self._wakes.supply.set()

    async def find_lost(self) -> None:
        """End the ready groups that the WorkSet no longer has, and make those ready again of which it forgot only that."""
        for group in list(self._book.ready()):
            if await self._intake.members(group):
                await self._intake.seal_again(group)
            elif group.trainable and not group.step and group.id in self._book.groups:
                await self._intake.lost(group)

    async def _end_again(self) -> None:
        """Whatever ended lately."""
        for group in list(self._book.dropped.values()):
            await self._journal.steadily(partial(self._workset.discard, group.id, group.fate))
            for index, member in enumerate(group.members):
                await self._intake.log_end(group, trajectory_id(group.id, index), member)
        self._wakes.ended.set()
