"""Keeps samples.jsonl, with the parts of it that were closed (actors/samples/parts.py): line i is the i-th end of a sample in the Store, whatever crashed in between, and whoever still writes.

Whoever takes the file over replaces it. A buffer that was replaced but does not know it yet has the old file open: what it still writes
changes nothing. Should it wake in the middle of taking the file itself, the newer buffer finds its own file replaced and takes it again.
"""

import asyncio
import os
import weakref
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from actors.samples.group import SampleEnd
from actors.samples.journal import ENDS_KEPT, Journal
from actors.samples.parts import LOST, SAMPLES, close_part, reopen, set_aside
from actors.samples.sample import remove_payloads, seed_of
from runtime.observe.trace import append_whole

if TYPE_CHECKING:
    from structlog.typing import FilteringBoundLogger

PAUSE_S = 5.0
"""Before the file is tried again when the disk refused it: space may be freed meanwhile."""

COMPARED = ENDS_KEPT + 1000
"""Lines of the file that are held against the Store: all that it may have, and what it was about to forget."""

KEY = ("trajectory_id", "attempt", "fate", "step", "epoch")
"""What tells a line from another sample's end, whatever else older or newer programs write into it."""


@dataclass(eq=False)
class SampleLedger:
    """The projection of the Store's log of ends, and the end of the payload files of samples it has written."""

    folder: Path
    journal: Journal
    token: int
    """The buffer's incarnation."""
    offload: Callable[..., Awaitable[Any]]
    """Runs a blocking function away from the event loop."""
    log: "FilteringBoundLogger"
    run_seed: int = 0
    rotate_bytes: int = 0
    """Size at which the file becomes a closed part; 0: never."""

    def __post_init__(self) -> None:
        self._path = self.folder / f"{SAMPLES}.jsonl"
        self._files = self.folder / "samples"
        self._turn = asyncio.Lock()
        self._file: LedgerFile | None = None
        self.index = 0
        """Lines written, those of closed parts too."""

    async def open(self) -> None:
        """Take the file over, with the lines that agree with the Store. A torn last line goes, and so do lines that a Store which
        lost its newest seconds has no record of."""
        async with self._turn:
            await self._take()

    async def follow(self) -> None:
        """Write whatever ends, until cancelled."""
        while True:
            more = self.journal.ended.event
            try:
                await self.catch_up()
                await self._rotate()
            except OSError as error:
                self.log.error("ledger_unwritable", path=str(self._path), error=str(error), retry_s=PAUSE_S)
                await asyncio.sleep(PAUSE_S)
            else:
                await more.wait()

    async def catch_up(self) -> None:
        """Return once the file has every end so far. Raises OSError, then nothing was written."""
        async with self._turn:
            while entries := await self.journal.ends(self.index):
                text = b"".join(msgspec.json.encode(line_of(end, self.run_seed)) + b"\n" for _, end in entries)
                if self._file is None or not await self.offload(self._file.write_lines, text):
                    await self.journal.sync()  # a buffer that was replaced ends here
                    await self._take()
                    continue
                self.index = entries[-1][0]
                self.journal.forget_ends(self.index)
                if self._files.is_dir():
                    await self.offload(remove_payloads, self._files, {end.trajectory_id for _, end in entries})

    async def check(self) -> None:
        """Write every end so far, also where somebody took the file away. Raises as `catch_up`."""
        async with self._turn:
            if self._file is None or not await self.offload(self._file.is_ours):
                await self._take()
        await self.catch_up()

    async def _rotate(self) -> None:
        """Close a part where the file has grown to its size."""
        async with self._turn:
            file = self._file
            if self.rotate_bytes and file is not None and await self.offload(file.size) >= self.rotate_bytes:
                fd = await self.offload(close_part, self.folder, self.token, file.is_ours)
                self._file = LedgerFile(self._path, fd) if fd is not None else None

    async def _take(self) -> None:
        closed = await self.offload(reopen, self.folder, COMPARED, self.token)
        num, newest = await self.offload(read_tail, self._path, COMPARED)
        agreed = await self._agreeing(closed + num, newest)
        if agreed < closed + num:
            kept = str(lost_path(self.folder))
            self.log.error("ends_lost_by_store", num=closed + num - agreed, from_line=agreed + 1, kept=kept)
        if agreed < closed:  # the Store is empty, or another one
            await self.offload(set_aside, self.folder)
            closed = agreed
        self._file = await self.offload(take_file, self._path, agreed - closed, num, self.token)
        self.index = agreed

    async def _agreeing(self, num_lines: int, newest: Sequence[bytes]) -> int:
        """How many of the file's lines tell what the Store has. Lines older than what the Store keeps are taken on trust, unless it
        has forgotten more than it keeps."""
        known = self.journal.groups.training.ended
        before, most = num_lines - len(newest), min(num_lines, known)
        if known < before:
            return 0
        num = before
        while num < most:
            entries = await self.journal.ends(num)
            num = min(entries[0][0] - 1, most) if entries else most
            for index, end in entries[: most - num]:
                if not _tells(newest[num - before], end):
                    return num
                num = index
        return num


def line_of(end: SampleEnd, run_seed: int = 0) -> dict[str, Any]:
    """One object of samples.jsonl: null is what a sample that was never trained, or of which no trajectory came, does not have.

    Age counts from the first token's version to the one that the step started from. `seed` is that of the environment. `purpose` is always
    `train`: held-out rollouts have no fate.
    """
    row = msgspec.structs.asdict(end) | msgspec.structs.asdict(end.outcome)
    del row["outcome"], row["info"], row["text"]
    row |= {"purpose": "train", "seed": seed_of("train", run_seed, end.row, end.task)}
    came, trained = end.outcome.version_first >= 0, end.step > 0
    if not came:
        row["version_first"] = None
    if end.outcome.tokens < 0:
        row |= {"tokens": None, "turns": None}
    if not trained:
        row |= {"step": None, "epoch": None}
    row["version_from"] = end.step - 1 if trained else None
    row["age"] = end.step - 1 - end.outcome.version_first if trained and came else None
    return row


def _tells(line: bytes, end: SampleEnd) -> bool:
    """Whether the line is about this very end."""
    try:
        row = msgspec.json.decode(line, type=dict[str, Any])
    except msgspec.MsgspecError:
        return False
    told = line_of(end)
    return all(row.get(key) == told[key] for key in KEY)


class LedgerFile:
    """An open samples.jsonl. Its methods block and raise OSError."""

    def __init__(self, path: Path, fd: int) -> None:
        self._path, self._fd = path, fd
        weakref.finalize(self, os.close, fd)

    def is_ours(self) -> bool:
        """Whether the path still leads to the file that this object writes."""
        try:
            return os.path.samestat(os.stat(self._path), os.fstat(self._fd))
        except FileNotFoundError:
            return False

    def size(self) -> int:
        """Bytes."""
        return os.fstat(self._fd).st_size

    def write_lines(self, text: bytes) -> bool:
        """Append all of `text`, or nothing and OSError; False, and nothing, where somebody replaced the file."""
        if not self.is_ours():
            return False
        append_whole(self._fd, text)
        return True


def read_tail(path: Path, most: int) -> tuple[int, deque[bytes]]:
    """How many complete lines `path` has, and the newest `most` of them, with their line ends. A missing file has none."""
    num, lines = 0, deque[bytes](maxlen=most)
    with suppress(FileNotFoundError), path.open("rb") as file:
        for line in file:
            if line.endswith(b"\n"):
                num += 1
                lines.append(line)
    return num, lines


def take_file(path: Path, keep: int, known: int, token: int) -> LedgerFile:
    """Put a file with the first `keep` lines in the place of `path`, under a name drawn from `token` until it is whole.

    The other lines up to line `known` go to the end of `samples.lost.jsonl`: they tell what the Store forgot.
    """
    for other in path.parent.glob(f"{path.name}.*"):
        other.unlink(missing_ok=True)
    path.touch()
    draft = path.with_name(f"{path.name}.{token}")
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o666)
    ours = LedgerFile(path, fd)
    with path.open("rb") as old, open(fd, "wb", closefd=False) as new:
        for _ in range(keep):
            new.write(old.readline())
        new.flush()
        os.fsync(fd)
        lost = list(islice(old, known - keep))
    if lost:
        with lost_path(path.parent).open("ab") as file:
            file.writelines(lost)
            file.flush()
            os.fsync(file.fileno())
    draft.replace(path)
    return ours


def lost_path(folder: Path) -> Path:
    """Where the lines are kept that a Store no longer knew."""
    return folder / f"{LOST}.jsonl"
