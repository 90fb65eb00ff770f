"""Closed parts of samples.jsonl: what was written first, packed as samples-000001.jsonl.gz and so on, so that the file itself stays small.

The parts in their order and then samples.jsonl are one text, of which line i tells the i-th end. How many lines each part has stands in
samples.parts.json, also of parts that a user removed to make room: line numbers go on.

Closing a part and opening it again each end with the replacement of samples.jsonl. Where a crash came before that, a part begins with the
very line that samples.jsonl begins with: from that part on they tell nothing that the file itself does not, and count for nothing.
"""

import gzip
import itertools
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import BinaryIO, cast

import msgspec

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
