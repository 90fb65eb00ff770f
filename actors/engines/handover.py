"""Hands a weights image to other processes of this host by path: in memory on Linux, never in a pickle or on a wire."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

_MOST = 1 << 30
"""Bytes per write: Linux takes at most 2 GiB at once."""


@contextmanager
def handed_over(image: memoryview) -> Iterator[str]:
    """A path that holds a copy of `image` while the block runs. Processes of the same user can open it; what they mapped stays.

    Raises OSError when there is no room for the copy.
    """
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("rubato-weights", os.MFD_CLOEXEC)
        path, temporary = f"/proc/{os.getpid()}/fd/{fd}", False
    else:
        fd, path = tempfile.mkstemp(prefix="rubato-weights-", suffix=".safetensors")
        temporary = True
    try:
        _write(fd, image)
        yield path
    finally:
        os.close(fd)
        if temporary:
            os.unlink(path)


def _write(fd: int, image: memoryview) -> None:
    rest = image.cast("B") if image.nbytes else memoryview(b"")
    while rest:
        rest = rest[os.write(fd, rest[:_MOST]) :]
