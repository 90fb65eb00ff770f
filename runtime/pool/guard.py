"""Ends what user code started in an actor's own process once that process ended, whatever ended it: `python guard.py PID MARK`.

What a worker starts is ended by the init above it (runtime/pool/sandbox.py). An actor has none above it, and what a killed process leaves
behind falls to the system. So a guard beside it waits for its end, and then kills its session, and every process that has MARK in its
environment: children inherit that. Only one that began a session of its own and was given another environment is not found. Linux only.
"""

import os
import select
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

VARIABLE = "RUBATO_STARTED_BY"

ROUNDS = 20
"""Of looking for more: a process may have started another one before it was killed."""


def guard_children() -> None:
    """Have whatever this process starts from now on end with it. Once is enough.

    Without effect where no launcher started it, as in a program that embeds a job: others live there too.
    """
    from rubato.runtime.importer import VARIABLE as LAUNCHED  # not as a script, whose folder is all that it can import from

    if sys.platform != "linux" or LAUNCHED not in os.environ or os.getsid(0) != os.getpid():
        return
    if os.environ.get(VARIABLE, "").startswith(f"{os.getpid()}-"):
        return
    mark = f"{os.getpid()}-{os.urandom(8).hex()}"
    # Isolated and without site packages: it needs nothing of them, and starts in a hundredth of a second.
    words = [sys.executable, "-I", "-S", __file__, str(os.getpid()), mark]
    null = [(os.POSIX_SPAWN_OPEN, fd, os.devnull, os.O_RDWR, 0) for fd in (0, 1, 2)]
    with suppress(OSError):
        os.posix_spawn(sys.executable, words, os.environ, file_actions=null, setsid=True)
        os.environ[VARIABLE] = mark


def main(pid: int, mark: str) -> None:
    """Wait for the end of `pid`, the parent; then end what it left."""
    try:
        ended = os.pidfd_open(pid)
    except ProcessLookupError:
        ended = -1
    while ended >= 0 and os.getppid() == pid and not select.select([ended], [], [], None)[0]:
        pass
    for _ in range(ROUNDS):
        left = [*_started_by(pid, f"{VARIABLE}={mark}".encode())]
        if not left:
            return
        for each in left:
            with suppress(OSError):  # it ended
                os.kill(each, signal.SIGKILL)


def _started_by(session: int, marked: bytes) -> Iterator[int]:
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit() or int(folder.name) == os.getpid():
            continue
        with suppress(OSError):  # it ended, or is another user's
            state, _, _, its_session = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()[:4]
            if state not in "ZX" and (int(its_session) == session or marked in (folder / "environ").read_bytes().split(b"\0")):
                yield int(folder.name)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
