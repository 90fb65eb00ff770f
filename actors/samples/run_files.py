"""What the run folder says of samples: samples.jsonl, of each how it ended, and a share of the trajectories, to be read.

Line i of samples.jsonl, with the parts of it that were closed, is the i-th end of a sample in the Store, whatever crashed in
between and however many buffers still write. A buffer that takes the file over replaces it. One that was replaced but does not know it yet
has the old file open: what it still writes changes nothing. Should it wake in the middle of taking the file itself, the newer buffer finds
its own file replaced and takes it again.

RUN/trajectories has one file for each trajectory that is kept, RUN/failed_trajectories the newest rollouts that failed, and RUN/evals what
each sample of an evaluation came to. A file holds a Trajectory as MessagePack, without log-probabilities. Of training every n-th group is
kept whole, of an evaluation its first rollouts. Where the files become too many every second group goes, and n doubles: what is left is
spread over the whole run.

What was written to samples.jsonl first is packed in parts, samples-000001.jsonl.gz and so on, so that the file itself stays small. The
parts in their order and then samples.jsonl are one text, of which line i tells the i-th end. How many lines each part has stands in
samples.parts.json, also of parts that a user removed to make room: line numbers go on.

Closing a part and opening it again each end with the replacement of samples.jsonl. Where a crash came before that, a part begins with the
very line that samples.jsonl begins with: from that part on they tell nothing that the file itself does not, and count for nothing.
"""

import asyncio
import gzip
import itertools
import os
import re
import shutil
import weakref
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, cast

import msgspec

from rubato.actors.checkpoints.checkpoint import sync_folder, write_through
from rubato.actors.messages.samples import MOST_TEXT, Ticket, Trajectory, shortened
from rubato.actors.samples.group import Group, SampleEnd
from rubato.actors.samples.journal import ENDS_KEPT, Journal
from rubato.actors.samples.sample import Outcome, remove_payloads, seed_of
from rubato.runtime.observe.trace import append_whole

if TYPE_CHECKING:
    from structlog.typing import FilteringBoundLogger

SAMPLES, LOST = "samples", "samples.lost"
"""Stems: of what the Store knows, and of what it forgot."""

INDEX = "samples.parts.json"

LEVEL = 3
"""Of gzip: a fifth of the size in a third of the time that the default level takes."""


class ClosedPart(msgspec.Struct, frozen=True):
    """A file and how many lines were put into it."""

    name: str
    lines: int


def read_lines(folder: Path, stem: str = SAMPLES) -> Iterator[bytes]:
    """Every complete line of `folder`'s samples.jsonl and of its closed parts, oldest first. A run that has none yields nothing.

    May be called while the file is written and its parts are closed: lines are those at the time of the first one.
    """
    try:
        live = (folder / f"{stem}.jsonl").open("rb")
    except FileNotFoundError:
        live = None
    first = live.readline() if live else b""
    for path in _closed(folder, first, stem):
        with suppress(FileNotFoundError), gzip.open(path, "rb") as part:
            yield from (line for line in part if line.endswith(b"\n"))
    if live:
        with live:
            yield from (line for line in itertools.chain((first,), live) if line.endswith(b"\n"))


def close_part(folder: Path, token: int, is_ours: Callable[[], bool]) -> int | None:
    """Pack samples.jsonl into a new part and put an empty file in its place, whose descriptor is returned, open to append.

    None, and nothing was done, where the file is not `is_ours` in the end. Blocks: about a second for 100 MB. Raises OSError; then
    samples.jsonl is as before, or the empty one is there.
    """
    live = folder / f"{SAMPLES}.jsonl"
    known = _counted(folder)
    part = folder / f"{SAMPLES}-{1 + max((_number(part.name) for part in known), default=0):06}.jsonl.gz"
    draft, empty = part.with_name(f"{part.name}.{token}"), live.with_name(f"{live.name}.{token}")
    with ExitStack() as undo:
        undo.callback(draft.unlink, missing_ok=True)
        with live.open("rb") as file:
            num = _pack(file, draft)
        fd = os.open(empty, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o666)
        failed = undo.enter_context(ExitStack())
        failed.callback(os.close, fd)
        failed.callback(empty.unlink, missing_ok=True)
        if not is_ours():
            return None
        os.link(draft, part)  # never over a part of another buffer
        empty.replace(live)
        _write_index(folder, [*known, ClosedPart(part.name, num)])
        failed.pop_all()
    return fd


def reopen(folder: Path, least: int, token: int) -> int:
    """Put closed parts back into samples.jsonl until it has `least` lines, or all; how many lines stay in closed parts. Raises OSError."""
    for draft in folder.glob(f"{SAMPLES}-*.jsonl.gz.*"):
        draft.unlink(missing_ok=True)
    live = folder / f"{SAMPLES}.jsonl"
    known, back = _counted(folder), list[ClosedPart]()
    have = _count(live.open("rb")) if live.exists() else 0
    while known and have < least and (folder / known[-1].name).exists():
        back.insert(0, known.pop())
        have += back[0].lines
    if back:
        draft = live.with_name(f"{live.name}.{token}")
        with ExitStack() as undo, draft.open("wb") as new:
            undo.callback(draft.unlink, missing_ok=True)
            for part in back:
                with gzip.open(folder / part.name, "rb") as old:
                    shutil.copyfileobj(old, new)
            if live.exists():
                with live.open("rb") as old:
                    shutil.copyfileobj(old, new)
            new.flush()
            os.fsync(new.fileno())
            draft.replace(live)
    _write_index(folder, known)
    _remove([folder / part.name for part in back])
    return sum(part.lines for part in known)


def set_aside(folder: Path) -> None:
    """The closed parts belong to what the Store forgot: they go behind those of `samples.lost`."""
    taken = max((_number(path.name) for path in _parts(folder, LOST)), default=0)
    for number, path in enumerate(_parts(folder, SAMPLES), taken + 1):
        path.rename(folder / f"{LOST}-{number:06}.jsonl.gz")
    _write_index(folder, [])


def _parts(folder: Path, stem: str) -> list[Path]:
    return sorted(folder.glob(f"{stem}-[0-9]*.jsonl.gz"), key=lambda path: _number(path.name))


def _number(name: str) -> int:
    digits = name.removesuffix(".jsonl.gz").rpartition("-")[2]
    return int(digits) if digits.isdecimal() else 0


def _closed(folder: Path, first: bytes, stem: str = SAMPLES) -> list[Path]:
    """The parts that count, oldest first, where samples.jsonl begins with the line `first`."""
    found = _parts(folder, stem)
    for at, path in enumerate(found):
        with suppress(OSError, EOFError), gzip.open(path, "rb") as part:
            if first and part.readline() == first:
                return found[:at]
    return found


def _counted(folder: Path) -> list[ClosedPart]:
    """The parts that count with their numbers of lines, those that a user removed too. What a crash left beside them is removed."""
    live = folder / f"{SAMPLES}.jsonl"
    first = b""
    if live.exists():
        with live.open("rb") as file:
            first = file.readline()
    there, whole = _parts(folder, SAMPLES), _closed(folder, first)
    left = {path.name for path in there[len(whole) :]}
    known = {part.name: part for part in _read_index(folder) if part.name not in left}
    if left:
        _write_index(folder, list(known.values()))
        _remove(there[len(whole) :])
    for path in whole:
        if path.name not in known:
            known[path.name] = ClosedPart(path.name, _count(_unpacked(path)))
    return sorted(known.values(), key=lambda part: _number(part.name))


def _remove(parts: list[Path]) -> None:
    """Remove parts whose lines samples.jsonl has. The index names them no more: what it names and is not there a user removed."""
    for path in reversed(parts):  # the newest first: those that are left still count for nothing
        path.unlink(missing_ok=True)


def _read_index(folder: Path) -> list[ClosedPart]:
    try:
        return msgspec.json.decode((folder / INDEX).read_bytes(), type=list[ClosedPart])
    except (FileNotFoundError, msgspec.MsgspecError):
        return []  # parts that are there are counted


def _write_index(folder: Path, parts: list[ClosedPart]) -> None:
    if not parts and not (folder / INDEX).exists():
        return
    draft = folder / f"{INDEX}.tmp"
    draft.write_bytes(msgspec.json.encode(parts))
    draft.replace(folder / INDEX)


def _count(file: BinaryIO) -> int:
    """Complete lines of an open file, which is closed."""
    with file:
        return sum(line.endswith(b"\n") for line in file)


def _unpacked(path: Path) -> BinaryIO:
    return cast("BinaryIO", gzip.open(path, "rb"))


def _pack(file: BinaryIO, path: Path) -> int:
    """Write the lines of `file` to a new gzip file, durably; how many they are."""
    num = 0
    with path.open("xb") as raw:
        with gzip.GzipFile("", "wb", LEVEL, raw) as packed:
            for line in file:
                num += line.endswith(b"\n")
                packed.write(line)
        raw.flush()
        os.fsync(raw.fileno())
    return num


PAUSE_S = 5.0
"""Before the file is tried again when the disk refused it: space may be freed meanwhile."""

COMPARED = ENDS_KEPT + 1000
"""Lines of the file that are held against the Store: all that it may have, and what it was about to forget."""

KEY = ("trajectory_id", "attempt", "fate", "step", "epoch")
"""Keys by which a line is another sample's end or the same, whatever else older or newer programs write into it."""


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
        """Write every end so far, also where the file was taken away. Raises as `catch_up`."""
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

    `epoch` is the term of the trainer, as it was called at first. Age counts from the first token's version to the one that the step started
    from. `seed` is that of the environment. `purpose` is always `train`: held-out rollouts have no fate.
    """
    row = msgspec.structs.asdict(end) | msgspec.structs.asdict(end.outcome)
    del row["outcome"], row["info"], row["text"]
    row |= {"epoch": row.pop("term"), "purpose": "train", "seed": seed_of("train", run_seed, end.row, end.task)}
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
        """Append all of `text`, or nothing and OSError; False, and nothing, where the file was replaced."""
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


FOLDER = "trajectories"
"""In the run folder."""

FAILED_FOLDER, FAILED_KEPT = "failed_trajectories", 256
"""Rollouts of training that failed: in a folder of the run folder, so many of the newest; the oldest goes first."""

EVAL_ROLLOUTS = 16
"""Of each evaluation: the same tasks each time, so that versions compare."""

EVAL_SHARE = 4
"""One file in so many may be an evaluation's."""


EVALS = "evals"
"""What became of each sample of held-out evaluations, in the run folder: VERSION.jsonl, one row for each."""

MOST_ROUND_TEXT = 64 * 1024 * 1024
"""Characters of text that one evaluation's file may hold: where it has so many samples each gets an equal share, if that is below
`MOST_TEXT`."""

WAITING = 1024
"""Trajectories that wait to be written; while the disk is slower than that more are not kept."""


class KeptTrajectories:
    """At most about `most` files in the run folder `run`, those of earlier launches included; 0 adds none.

    `offload` runs a blocking function away from the event loop. Nothing here raises for a disk that refuses: it is logged, once.
    """

    def __init__(self, run: Path, most: int, group_size: int, offload: Callable[..., Awaitable[Any]], log: "FilteringBoundLogger") -> None:
        self._folder = run / FOLDER
        self._offload, self._log = offload, log
        self._waiting: list[Trajectory] = []
        self._failed = FailedTrajectories(run / FAILED_FOLDER, min(most, FAILED_KEPT))
        self._arrived = asyncio.Event()
        self._refused = False
        self._keeps = most > 0
        self._most_groups = max(1, (most - most // EVAL_SHARE) // group_size) if most else 0
        self._most_rounds = most // EVAL_SHARE // EVAL_ROLLOUTS
        self._stride = 1
        self._groups: set[str] = set()
        self._rounds: dict[str, None] = {}

    def offer(self, trajectory: Trajectory) -> None:
        """Keep it soon, if it is one to be kept."""
        if trajectory.reason:
            if trajectory.ticket.purpose == "train":
                self._failed.waiting.append(trajectory)
                self._arrived.set()
        elif self._wants(trajectory.ticket) and len(self._waiting) < WAITING:
            self._waiting.append(trajectory)
            self._arrived.set()

    async def follow(self) -> None:
        """Write what is offered, until cancelled."""
        if self._keeps:
            await self._guarded(self._open)
            await self._guarded(self._failed.open)
        while True:
            await self._arrived.wait()
            await self.catch_up()

    async def catch_up(self) -> None:
        """Write what was offered so far."""
        self._arrived.clear()
        waiting, self._waiting = self._waiting, []
        await self._guarded(lambda: self._write(waiting))
        failed = self._failed.take()
        await self._guarded(lambda: self._failed.write(failed))

    async def _guarded(self, work: Callable[[], None]) -> None:
        try:
            await self._offload(work)
        except OSError as error:
            if not self._refused:
                self._log.warning("trajectories_not_kept", path=str(self._folder), error=str(error))
            self._refused = True

    def _wants(self, ticket: Ticket) -> bool:
        if ticket.purpose == "eval":
            return self._most_rounds > 0 and int(ticket.trajectory_id.rpartition(".")[2]) < EVAL_ROLLOUTS
        return self._most_groups > 0 and number_of(ticket.group_id) % self._stride == 0

    def _open(self) -> None:
        names = {path.name.rsplit(".", 2)[0] for path in self._folder.iterdir()} if self._folder.is_dir() else set()
        for name in sorted(names, key=lambda name: [int(part) for part in re.findall(r"\d+", name)]):
            self._note(name)
        self._thin()

    def _write(self, trajectories: Iterable[Trajectory]) -> None:
        """What a kill leaves half written is passed over by readers."""
        for trajectory in trajectories:
            _write(self._folder, trajectory)
            self._note(trajectory.ticket.group_id)
        self._thin()

    def _note(self, group: str) -> None:
        if group.startswith("eval-"):
            self._rounds[group] = None
        else:
            self._groups.add(group)

    def _thin(self) -> None:
        gone: set[str] = set()
        while len(self._groups) > self._most_groups and self._stride < 1 << 40:
            self._stride *= 2
            gone |= {name for name in self._groups if number_of(name) % self._stride}
            self._groups -= gone
        while len(self._rounds) > max(1, self._most_rounds):
            # Every second one, but never the newest.
            gone |= set(list(self._rounds)[-2::-2])
            self._rounds = {name: None for name in self._rounds if name not in gone}
        if gone:
            for path in self._folder.iterdir():
                if path.name.rsplit(".", 2)[0] in gone:
                    path.unlink(missing_ok=True)


class FailedTrajectories:
    """Rollouts that failed, in a folder of their own: the newest `most`. Those that wait to be written are no more than that either."""

    def __init__(self, folder: Path, most: int) -> None:
        self._folder, self._most = folder, most
        self._written: dict[Path, None] = {}
        self.waiting: deque[Trajectory] = deque(maxlen=most)

    def open(self) -> None:
        """Count what earlier launches left, oldest first. Blocks; raises OSError."""
        if self._folder.is_dir():
            self._written = dict.fromkeys(sorted(self._folder.iterdir(), key=lambda path: path.stat().st_mtime_ns))

    def take(self) -> list[Trajectory]:
        """What waits to be written, for `write`."""
        taken = list(self.waiting)
        self.waiting.clear()
        return taken

    def write(self, trajectories: Iterable[Trajectory]) -> None:
        """Blocks; raises OSError."""
        for trajectory in trajectories:
            self._written[_write(self._folder, trajectory)] = None
            while len(self._written) > self._most:
                oldest = next(iter(self._written))
                del self._written[oldest]
                oldest.unlink(missing_ok=True)


def _write(folder: Path, trajectory: Trajectory) -> Path:
    folder.mkdir(mode=0o700, exist_ok=True)
    path = folder / f"{trajectory.ticket.trajectory_id}.{trajectory.ticket.attempt}"
    lean = tuple(msgspec.structs.replace(segment, logprobs=b"") for segment in trajectory.segments)
    path.write_bytes(msgspec.msgpack.encode(msgspec.structs.replace(trajectory, segments=lean, text="")))
    return path


def fitting(outcome: Outcome, group: Group | None) -> Outcome:
    """With no more text than the file of its round `group` may have of it."""
    if not outcome.text or group is None:
        return outcome
    most = min(MOST_TEXT, MOST_ROUND_TEXT // len(group.members))
    return msgspec.structs.replace(outcome, text=shortened(outcome.text, most))


def rows_of(group: Group) -> Iterator[dict[str, Any]]:
    """Of a complete held-out round: prompts in the order of the evaluation, the samples of each next to each other.

    `finish` is how the last turn ended, `stop` or `length`; of a rollout that failed why it did, and its `reward` is null.
    """
    for index, member in enumerate(group.members):
        (task, row), outcome = group.exam[index // group.samples], member.outcome
        scored = member.state == "scored"
        last = outcome.finish_reasons[-1] if outcome.finish_reasons else ""
        yield {
            "task": task,
            "row": row,
            "sample": index % group.samples,
            "reward": outcome.reward if scored else None,
            "finish": last if scored else member.reason or member.fate,
            "text": outcome.text,
            "turns": outcome.turns,
        }


class HeldOutFiles:
    """Writes the file of each round. An evaluation of a version that comes again replaces the file of the one before."""

    def __init__(self, run: Path, offload: Callable[..., Awaitable[Any]], log: "FilteringBoundLogger") -> None:
        self._folder = run / EVALS
        self._offload, self._log = offload, log

    async def keep(self, group: Group) -> None:
        """Write what a complete round came to, once, and let go of its texts. A disk that refuses is logged: the evaluation counts."""
        if group.filed:
            return
        group.filed = True
        lines = b"".join(msgspec.json.encode(row) + b"\n" for row in rows_of(group))
        for member in group.members:
            member.outcome = msgspec.structs.replace(member.outcome, text="")
        try:
            await self._offload(self._write, f"{group.begun}.jsonl", lines)
        except OSError as error:
            self._log.warning("held_out_samples_not_kept", path=str(self._folder), error=str(error))

    def _write(self, name: str, lines: bytes) -> None:
        self._folder.mkdir(mode=0o700, exist_ok=True)
        partial = self._folder / f"{name}.partial"
        write_through(partial, lines)
        partial.replace(self._folder / name)
        sync_folder(self._folder)


def number_of(group: str) -> int:
    """The place of a training group in the order of groups; 0 of any other name."""
    digits = group.removeprefix("g")
    return int(digits) if digits.isdecimal() else 0


def read_kept(folder: Path) -> Iterator[Trajectory]:
    """What is kept in the run folder `folder`, in no order. A file that is half written, or gone meanwhile, is passed over."""
    places = [place for place in (folder / FOLDER, folder / FAILED_FOLDER) if place.is_dir()]
    for path in (path for place in places for path in place.iterdir()):
        with suppress(OSError, msgspec.MsgspecError):
            yield msgspec.msgpack.decode(path.read_bytes(), type=Trajectory)
