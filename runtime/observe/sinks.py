"""Append-only JSON-lines files with a size limit: what an actor writes for people and tools to read later."""

import os
from pathlib import Path
from typing import IO

import msgspec

BUFFERED = 256
"""Lines gathered before they are written, so that a line costs no system call."""


class JsonLines:
    """Appends one JSON object per line to `path`, up to `max_bytes` in all, an earlier process's lines included.

    At the limit `write` says False and drops the line; `dropped` counts them. Opened at the first line. A line that a killed
    process left half written is closed off, never continued.
    """

    def __init__(self, path: Path, *, max_bytes: int) -> None:
        self._path = path
        self._left = max_bytes
        self._lines: list[bytes] = []
        self._file: IO[bytes] | None = None
        self.max_bytes = max_bytes
        self.dropped = 0

    @property
    def fill(self) -> float:
        """Share of the limit that is used, 0 to 1."""
        return 1.0 - max(0, self._left) / self.max_bytes

    def write(self, row: object) -> bool:
        """Take one row; it is on its way to the file after `flush`, or after `BUFFERED` rows."""
        if self._file is None:
            self._open()
        line = msgspec.json.encode(row) + b"\n"
        if len(line) > self._left:
            self.dropped += 1
            return False
        self._left -= len(line)
        self._lines.append(line)
        if len(self._lines) >= BUFFERED:
            self.flush()
        return True

    def flush(self) -> None:
        """Hand gathered lines to the operating system."""
        if self._lines and self._file is not None:
            self._file.write(b"".join(self._lines))
            self._file.flush()
            self._lines.clear()

    def close(self) -> None:
        """Flush and close; a later `write` opens the file again."""
        self.flush()
        if self._file is not None:
            self._file.close()
            self._file = None

    def _open(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self._path.open("ab+")
        size = self._file.seek(0, os.SEEK_END)
        self._left = self.max_bytes - size
        if size:
            self._file.seek(-1, os.SEEK_END)
            if self._file.read(1) != b"\n":
                self._lines.append(b"\n")
