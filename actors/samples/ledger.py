"""Owns samples.jsonl: line i is the i-th end of a sample in the WorkSet, whatever crashed in between."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from actors.samples.journal import Journal
from actors.samples.sample import Note, remove_payloads
from actors.samples.wake import Wake
from runtime.store.workset import Ended, WorkSet

if TYPE_CHECKING:
    from structlog.typing import FilteringBoundLogger

PAUSE_S = 5.0
"""Before the file is tried again when the disk refused it: space may be freed meanwhile."""

ENTRIES = 1000
"""Entries read and written at a time: a quarter of a megabyte."""

KEPT = 20_000
"""Ends that stay in the Store behind the file, in case the machine loses the file's last pages. Their ids stay known as long: a put
or an end of an older one can only come from a buffer that was replaced as long ago, and that one is fenced before it writes."""


class Line(msgspec.Struct, frozen=True):
    """One object of samples.jsonl. `step`, `epoch`, `version_from` and `age` are null where the sample was never trained."""

    trajectory_id: str
    group_id: str
    attempt: int
    task: int
    fate: str
    step: int | None
    epoch: int | None
    version_first: int | None
    version_from: int | None
    age: int | None
    reward: float | None
    tokens: int
    turns: int
    wall_s: float
    reason: str


class Offload(Protocol):
    """Runs a blocking function away from the event loop."""

    def __call__(self, fn: Callable[..., Any], *args: Any) -> Awaitable[Any]: ...


class Ledger:
    """The projection, and the end of the payload files of samples it has written."""

    def __init__(
        self, folder: Path, workset: WorkSet, journal: Journal, offload: Offload, log: "FilteringBoundLogger"
    ) -> None:
        self._path = folder / "samples.jsonl"
        self._files = folder / "samples"
        self._workset = workset
        self._journal = journal
        self._offload = offload
        self._log = log
        self._turn = asyncio.Lock()
        self.index = 0
        """Lines written."""

    async def open(self) -> None:
        """Count the file's lines. A torn last line goes, and so do lines that a Store which lost its newest seconds has no record of."""
        counts = await self._journal.steadily(self._workset.counts)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self.index = keep_lines(self._path, counts.ended)

    async def follow(self, ended: Wake) -> None:
        """Write whatever ends, until cancelled."""
        while True:
            more = ended.next()
            try:
                await self.catch_up()
            except OSError as error:
                self._log.error("ledger_unwritable", path=str(self._path), error=str(error), retry_s=PAUSE_S)
                await asyncio.sleep(PAUSE_S)
            else:
                await more.wait()

    async def catch_up(self) -> None:
        """Return once the file has every end so far. Raises OSError; then nothing was written."""
        async with self._turn:
            while entries := await self._journal.steadily(self._next):
                text = b"".join(msgspec.json.encode(line_of(entry)) + b"\n" for entry in entries)
                await self._offload(_append, self._path, text)
                before, self.index = self.index, entries[-1].index
                if self._files.is_dir():
                    await self._offload(remove_payloads, self._files, [entry.id for entry in entries])
                if before // ENTRIES != self.index // ENTRIES and self.index > KEPT:
                    await self._journal.steadily(self._trim)

    async def _trim(self) -> None:
        await self._workset.trim(self.index - KEPT)

    async def _next(self) -> list[Ended]:
        return await self._workset.ended(self.index, limit=ENTRIES)


def line_of(ended: Ended) -> Line:
    """Age counts from the first token's version to the one that the step started from."""
    note = msgspec.msgpack.decode(ended.note, type=Note) if ended.note else Note(attempt=0, task=-1)
    came, trained = note.version_first >= 0, ended.step > 0
    return Line(
        trajectory_id=ended.id,
        group_id=ended.group,
        attempt=note.attempt,
        task=note.task,
        fate=ended.fate,
        step=ended.step if trained else None,
        epoch=ended.epoch if trained else None,
        version_first=note.version_first if came else None,
        version_from=ended.step - 1 if trained else None,
        age=ended.step - 1 - note.version_first if trained and came else None,
        reward=note.reward,
        tokens=note.tokens,
        turns=note.turns,
        wall_s=note.wall_s,
        reason=note.reason,
    )


def keep_lines(path: Path, most: int) -> int:
    """Cut `path` after its last complete line, or after `most` lines; returns how many are left. A missing file has none."""
    count = size = 0
    try:
        with path.open("rb+") as file:
            for line in file:
                if count == most or not line.endswith(b"\n"):
                    break
                count += 1
                size += len(line)
            file.truncate(size)
    except FileNotFoundError:
        return 0
    return count


def _append(path: Path, text: bytes) -> None:
    """All of `text`, or nothing and OSError."""
    with path.open("ab", buffering=0) as file:
        start = file.seek(0, 2)
        try:
            view = memoryview(text)
            while view:
                view = view[file.write(view) :]
        except OSError:
            file.truncate(start)
            raise
