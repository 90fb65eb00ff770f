"""Rebuilds the buffer from the Store: its own records say what was under way, the WorkSet says what arrived."""

from functools import partial

import msgspec

from actors.messages.samples import Standing
from actors.samples.book import Book
from actors.samples.evaluation import is_round
from actors.samples.groups import Group
from actors.samples.intake import Intake
from actors.samples.journal import Journal
from actors.samples.sample import trajectory_id
from planning.staleness import OLDEST
from runtime.store.store import Store
from runtime.store.workset import WorkSet

STANDING = "samples/standing"
CURSOR = "samples/cursor"
GROUP = "samples/group/"


class Records:
    """The Store's keys of a book: `samples/standing`, `samples/cursor`, and `samples/group/<id>` while the group holds a slot."""

    def __init__(self, store: Store, journal: Journal) -> None:
        self._store = store
        self._journal = journal
        self._book: Book | None = None

    def of(self, book: Book) -> None:
        self._book = book

    def changed(self, name: str) -> None:
        """Group `name` changed or ended. Held-out rounds are not kept."""
        book = self._book
        if book is None or is_round(name):
            return

        def encode() -> bytes | None:
            group = book.groups.get(name) or book.trained.get(name)
            return None if group is None else msgspec.msgpack.encode(group)

        self._journal.mark(GROUP + name, encode)

    def moved(self) -> None:
        """Version or cursor changed."""
        book = self._book
        if book is not None:
            self._journal.mark(STANDING, lambda: msgspec.msgpack.encode(book.standing))
            self._journal.mark(CURSOR, lambda: b"%d" % book.cursor)

    def all_changed(self) -> None:
        """Write everything anew, for a Store that may have lost its newest writes."""
        self.moved()
        for name in [*self._book.groups, *self._book.trained] if self._book else ():
            self.changed(name)

    async def groups(self) -> list[Group]:
        """Recorded groups, oldest first."""
        found = await self._journal.steadily(partial(self._store.scan, GROUP))
        return [msgspec.msgpack.decode(value, type=Group) for _, value in sorted(found.items())]

    async def standing(self) -> tuple[int, int]:
        """(version, cursor); zeros in a new run."""
        standing = await self._journal.steadily(partial(self._store.get, STANDING))
        cursor = await self._journal.steadily(partial(self._store.get, CURSOR))
        version = msgspec.msgpack.decode(standing, type=Standing).version if standing else 0
        return version, int(cursor or b"0")


async def rebuild(book: Book, records: Records, journal: Journal, workset: WorkSet, intake: Intake, now: float) -> None:
    """Fill an empty book. Running tickets keep their attempt and get a fresh lease, so that their holders may still put."""
    await journal.prove()  # from here on nothing that is read below is changed by a buffer that was replaced
    book.version, book.cursor = await records.standing()
    counts = await journal.steadily(workset.counts)
    book.epoch, book.committed, book.bound = counts.epoch, counts.committed, set(counts.bound_steps)
    step_of = await _bound_groups(book, journal, workset)
    for group in await records.groups():
        book.cursor = max(book.cursor, group.task + 1)
        group.step = step_of.get(group.id, 0)
        group.sealed = group.sealed or group.step > 0
        held = await intake.members(group)
        await _log_failed(group, intake)
        if group.sealed and not held:
            records.changed(group.id)
            continue
        if 0 < group.step <= book.version:
            book.trained[group.id] = group
            continue
        _reconcile(group, held)
        book.add(group, now)
        await _finish(group, intake)
    records.moved()
    await journal.flush()


async def _bound_groups(book: Book, journal: Journal, workset: WorkSet) -> dict[str, int]:
    """Step of each group that is bound."""
    step_of: dict[str, int] = {}
    for step in sorted(book.bound):
        claimed = await journal.steadily(partial(workset.claim, 1, OLDEST, step, book.epoch))
        step_of.update((name, step) for name, _ in claimed.groups)
    return step_of


def _reconcile(group: Group, held: tuple[str, ...]) -> None:
    for index, member in enumerate(group.members):
        if member.state in ("putting", "scored"):
            member.state = "scored" if trajectory_id(group.id, index) in held else "running"


async def _log_failed(group: Group, intake: Intake) -> None:
    for index, member in enumerate(group.members):
        if member.state == "failed":
            await intake.log_end(group, trajectory_id(group.id, index), member)


async def _finish(group: Group, intake: Intake) -> None:
    """Carry on what a crash cut short."""
    if group.step:
        return
    if group.fate and not group.trainable:
        await intake.discard(group, group.fate)
        return
    if group.complete:
        await intake.complete(group)
    elif group.fate:
        group.fate = ""
