"""The trainer's end of what crosses between it and ranks on other hosts: their rows come to it, and a checkpoint goes to their hosts."""

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rubato.actors.checkpoints.checkpoint import MANIFEST, RECEIPTS, manifest_of
from rubato.actors.messages.ranks import FindCheckpoint, PutFile, ReadRows, RowsPart
from rubato.actors.ranks.copies import write_at
from rubato.bus.message import Buffer, Request

PART_BYTES = 16 * 2**20
"""Of one request."""

AT_ONCE = 2
"""Requests under way with one rank: the next part crosses while one is written."""

Ask = Callable[[str, Request[Any]], Awaitable[Any]]
"""The reply of a rank, by its name."""
Offload = Callable[..., Awaitable[Any]]
"""The actor's."""
Put = Callable[[RowsPart], None]
"""What to do with a part. Blocks."""


async def read_rows(ask: Ask, offload: Offload, term: int, of: str, sizes: Mapping[str, int], put: Put) -> None:
    """Read all rows of several ranks, name → bytes of its rows, side by side; `of`: see ReadRows."""

    async def read(name: str, begins: Iterator[int]) -> None:
        for begin in begins:
            await offload(put, await ask(name, ReadRows(term, of, begin, PART_BYTES)))

    async with asyncio.TaskGroup() as tasks:
        for name, size in sizes.items():
            begins = iter(range(0, size, PART_BYTES))
            for _ in range(AT_ONCE):
                tasks.create_task(read(name, begins))


def put_into(memory: memoryview) -> Put:
    """Parts of weights belong into this image."""

    def put(part: RowsPart) -> None:
        for (_, at, num), data in _split(part):
            memory[at : at + num] = data

    return put


def write_into(handles: Mapping[str, int]) -> Put:
    """Parts of a checkpoint belong into these open files."""

    def put(part: RowsPart) -> None:
        for (file, at, _), data in _split(part):
            write_at(handles[file], data, at)

    return put


def _split(part: RowsPart) -> Iterator[tuple[tuple[str, int, int], memoryview]]:
    begin = 0
    for place in part.places:
        yield place, part.data.data[begin : begin + place[2]]
        begin += place[2]


def open_files(folder: Path, sizes: Mapping[str, int]) -> dict[str, int]:
    """File → a handle to write into it; each is made as long as it will be. Blocks; raises OSError."""
    handles = dict[str, int]()
    try:
        for file, size in sizes.items():
            handles[file] = os.open(folder / file, os.O_WRONLY | os.O_CREAT, 0o644)
            os.ftruncate(handles[file], size)
    except OSError:
        close_files(handles, sync=False)
        raise
    return handles


def close_files(handles: Mapping[str, int], *, sync: bool = True) -> None:
    """On disk when this returns. Blocks; raises OSError."""
    try:
        for handle in handles.values() if sync else ():
            os.fsync(handle)
    finally:
        for handle in handles.values():
            os.close(handle)


async def bring_checkpoint(ask: Ask, offload: Offload, term: int, checkpoint: Path, names: Sequence[str]) -> list[str]:
    """Where each of these ranks, one of each host, has the checkpoint; hosts that lack it are sent it."""
    manifest = await offload((checkpoint / MANIFEST).read_bytes)
    files = [name for name in (await offload(manifest_of, checkpoint)).files if name != RECEIPTS]

    async def bring(name: str) -> str:
        find = FindCheckpoint(term, str(checkpoint), manifest)
        if not (found := (await ask(name, find)).folder):
            for file in files:
                await _send_file(ask, offload, term, checkpoint, file, name)
            await ask(name, PutFile(term, str(checkpoint), MANIFEST, 0, Buffer(manifest)))
            found = (await ask(name, find)).folder
        return found

    async with asyncio.TaskGroup() as tasks:
        bringing = [tasks.create_task(bring(name)) for name in names]
    return [task.result() for task in bringing]


async def _send_file(ask: Ask, offload: Offload, term: int, folder: Path, file: str, name: str) -> None:
    size = (await offload((folder / file).stat)).st_size
    begins = iter(range(0, max(size, 1), PART_BYTES))

    async def send() -> None:
        for begin in begins:
            data = await offload(_part_of, folder / file, begin)
            await ask(name, PutFile(term, str(folder), file, begin, Buffer(data)))

    async with asyncio.TaskGroup() as tasks:
        for _ in range(AT_ONCE):
            tasks.create_task(send())


def _part_of(path: Path, begin: int) -> bytes:
    with path.open("rb") as file:
        file.seek(begin)
        return file.read(PART_BYTES)
