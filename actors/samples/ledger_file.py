"""samples.jsonl as one buffer writes it.

Whoever takes the file over replaces it. A buffer that was replaced but does not know it yet has the old file open: what it
still writes changes nothing. Should it wake in the middle of taking the file itself, the newer buffer finds its own file
replaced and takes it again.
"""

import os
import weakref
from collections import deque
from itertools import islice
from pathlib import Path
from typing import NamedTuple


class Tail(NamedTuple):
    """`num` complete lines, of which `lines` are the newest, with their line ends."""

    num: int
    lines: deque[bytes]


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

    def write_lines(self, text: bytes) -> bool:
        """Append all of `text`, or nothing and OSError; False, and nothing, where somebody replaced the file."""
        if not self.is_ours():
            return False
        start = os.lseek(self._fd, 0, os.SEEK_END)
        try:
            view = memoryview(text)
            while view:
                view = view[os.write(self._fd, view) :]
        except OSError:
            os.ftruncate(self._fd, start)
            raise
        return True


def read_tail(path: Path, most: int) -> Tail:
    """Count the complete lines of `path` and keep the newest `most`. A missing file has none."""
    num, lines = 0, deque[bytes](maxlen=most)
    try:
        with path.open("rb") as file:
            for line in file:
                if line.endswith(b"\n"):
                    num += 1
                    lines.append(line)
    except FileNotFoundError:
        pass
    return Tail(num, lines)


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
    return folder / "samples.lost.jsonl"
