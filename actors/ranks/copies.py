"""What crosses between a rank and a trainer on another host: rows on their way out, and a checkpoint on its way in."""

import os
import shutil
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from contextlib import suppress
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

from rubato.actors.checkpoints.checkpoint import MANIFEST, CheckpointError

FOLDER = "ranks"
"""Of a run's folder, in which its ranks keep what is theirs for a term."""


class CopiedRows(NamedTuple):
    """Rows of one or several files, read as one row of bytes."""

    pieces: list[tuple[str, int, memoryview]]
    """The file, where in it, and the bytes."""
    begins: list[int]
    """Where each piece begins among all bytes."""
    num_bytes: int

    @classmethod
    def of(cls, files: Mapping[str, Iterable[tuple[int, memoryview]]]) -> "CopiedRows":
        pieces = [(file, at, values) for file, rows in files.items() for at, values in rows if len(values)]
        *begins, num_bytes = accumulate((len(values) for _, _, values in pieces), initial=0)
        return cls(pieces, begins, num_bytes)

    def part(self, begin: int, num_bytes: int) -> tuple[tuple[tuple[str, int, int], ...], bytes]:
        """The bytes from `begin` on, and for consecutive ones of them the file, where in it, and how many. Copies them."""
        places, parts = list[tuple[str, int, int]](), list[memoryview]()
        end = min(begin + num_bytes, self.num_bytes)
        index = bisect_right(self.begins, begin) - 1
        while begin < end:
            file, at, values = self.pieces[index]
            within = begin - self.begins[index]
            part = values[within : within + end - begin]
            places.append((file, at + within, len(part)))
            parts.append(part)
            begin, index = begin + len(part), index + 1
        return tuple(places), b"".join(parts)


class CheckpointCopy:
    """On a host that does not see the trainer's files, the copy of one checkpoint. It is whole once its manifest is there, which comes last."""

    def __init__(self, run: Path, folder: str) -> None:
        """`run` is this host's folder of the run, and `folder` the checkpoint on the trainer's host."""
        self._there, self._room = Path(folder), run / FOLDER
        self._here = self._room / self._there.name

    def found(self, manifest: bytes) -> str:
        """Where this host has a checkpoint with this manifest. Where it has none, what it had of others goes. Blocks; raises CheckpointError."""
        for folder in (self._there, self._here):
            with suppress(OSError):
                if (folder / MANIFEST).read_bytes() == manifest:
                    return str(folder)
        try:
            for old in self._room.glob("step_*"):
                shutil.rmtree(old)
        except OSError as error:
            raise CheckpointError(f"an older copy of a checkpoint can't be removed from {self._room}: {error.strerror}") from error
        return ""

    def put(self, name: str, begin: int, data: memoryview) -> None:
        """Write `data` at the byte `begin` of the file `name`. Blocks; raises OSError, and CheckpointError for a name that leads elsewhere."""
        path = self._here / name
        if not path.resolve().is_relative_to(self._here.resolve()):
            raise CheckpointError(f"{name!r} is no file of a checkpoint")
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
        try:
            write_at(handle, data, begin)
        finally:
            os.close(handle)


def write_at(handle: int, data: memoryview, begin: int) -> None:
    """Write all of `data` at `begin` of an open file. Blocks; raises OSError."""
    while data:
        num = os.pwrite(handle, data, begin)
        data, begin = data[num:], begin + num
