"""Keeps samples.jsonl: line i is the i-th end of a sample in the WorkSet, whatever crashed in between, and whoever still writes."""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import msgspec

from actors.samples.journal import Journal
from actors.samples.ledger_file import LedgerFile, lost_path, read_tail, take_file
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


class _Key(msgspec.Struct, frozen=True):
    """What tells a line from another sample's end, whatever else older or newer programs write into it."""

    trajectory_id: str
    attempt: int
    fate: str
    step: int | None
    epoch: int | None


class _Agreed(NamedTuple):
    """How far file and Store are the same: `num` of the file's `lines` lines; `last` is the entry of that line, where it is known."""

    lines: int
    num: int
    last: Ended | None


class Offload(Protocol):
    """Runs a blocking function away from the event loop."""

    def __call__(self, fn: Callable[..., Any], *args: Any) -> Awaitable[Any]: ...


class SampleLedger:
    """The projection, and the end of the payload files of samples it has written. `token` is the buffer's incarnation.

    `on_loss` is called when the Store turns out to have forgotten an end.
    """

    def __init__(
        self,
        folder: Path,
        workset: WorkSet,
        journal: Journal,
        token: int,
        on_loss: Callable[[], None],
        offload: Offload,
        log: "FilteringBoundLogger",
    ) -> None:
        self._path = folder / "samples.jsonl"
        self._files = folder / "samples"
        self._workset = workset
        self._journal = journal
        self._token = token
        self._on_loss = on_loss
        self._offload = offload
        self._log = log
        self._turn = asyncio.Lock()
        self._file: LedgerFile | None = None
        self._last: Ended | None = None
        """The end that the newest line tells of: should the Store say otherwise, it forgot."""
        self.index = 0
        """Lines written."""

    async def open(self) -> None:
        """Take the file over, with the lines that agree with the Store. A torn last line goes, and so do lines that a Store which
        lost its newest seconds has no record of."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        async with self._turn:
            await self._take(await self._compare())

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
        """Return once the file has every end so far. Raises OSError, then nothing was written, and Fenced."""
        async with self._turn:
            while entries := await self._next():
                text = b"".join(msgspec.json.encode(line_of(entry)) + b"\n" for entry in entries)
                if self._file is None or not await self._offload(self._file.write_lines, text):
                    await self._take_again()
                    continue
                before, self.index, self._last = self.index, entries[-1].index, entries[-1]
                if self._files.is_dir():
                    await self._offload(remove_payloads, self._files, [entry.id for entry in entries])
                if before // ENTRIES != self.index // ENTRIES and self.index > KEPT:
                    await self._journal.steadily(self._trim)

    async def check(self) -> None:
        """Write every end so far, and bring lines that the Store since forgot in line with it. Raises as `catch_up`."""
        async with self._turn:
            agreed = await self._compare()
            whole = agreed.num == agreed.lines == self.index
            if not whole or self._file is None or not await self._offload(self._file.is_ours):
                await self._take_again()
        await self.catch_up()

    async def _next(self) -> list[Ended]:
        """What the file lacks. The newest line's own entry is asked for too: where it is gone or another, the Store forgot."""
        while True:
            known = [] if self._last is None else [self._last]
            ask = partial(self._workset.ended, self.index - len(known), limit=ENTRIES)
            entries = await self._journal.steadily(ask)
            if entries[: len(known)] == known:
                return entries[len(known) :]
            self._on_loss()
            await self._take_again()

    async def _take_again(self) -> None:
        """The file is another's, or the Store forgot. A buffer that was replaced meanwhile is fenced here."""
        await self._journal.prove()
        await self._take(await self._compare())

    async def _take(self, agreed: _Agreed) -> None:
        if lost := agreed.lines - agreed.num:
            kept = str(lost_path(self._path.parent))
            self._log.error("ends_lost_by_store", num=lost, from_line=agreed.num + 1, kept=kept)
        self._file = await self._offload(take_file, self._path, agreed.num, agreed.lines, self._token)
        self.index, self._last = agreed.num, agreed.last

    async def _compare(self) -> _Agreed:
        """Lines older than what the Store keeps are taken on trust, unless it has forgotten more than it keeps."""
        tail = await self._offload(read_tail, self._path, KEPT + ENTRIES)
        counts = await self._journal.steadily(self._workset.counts)
        before, most = tail.num - len(tail.lines), min(tail.num, counts.ended)
        if counts.ended < before:
            return _Agreed(tail.num, 0, None)
        num, last = before, None
        while num < most:
            entries = await self._journal.steadily(partial(self._workset.ended, num, limit=ENTRIES))
            num = min(entries[0].index - 1, most) if entries else most
            for entry in entries[: most - num]:
                if not _tells(tail.lines[num - before], entry):
                    return _Agreed(tail.num, num, last)
                num, last = entry.index, entry
        return _Agreed(tail.num, num, last)

    async def _trim(self) -> None:
        await self._workset.trim(self.index - KEPT)


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


def _tells(line: bytes, entry: Ended) -> bool:
    """Whether the line is about this very end."""
    try:
        key = msgspec.json.decode(line, type=_Key)
    except msgspec.MsgspecError:
        return False
    told = line_of(entry)
    return key == _Key(told.trajectory_id, told.attempt, told.fate, told.step, told.epoch)
