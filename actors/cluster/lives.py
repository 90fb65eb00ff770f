"""Processes of jobs: started so that they outlive their scheduler, found again by the next one, and seen to end."""

import asyncio
import fcntl
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

from rubato.actors.cluster.job import JobFiles
from rubato.runtime.launch.children import last_line


class JobLife:
    """One life of a job: what runs in its run folder `folder`."""

    def __init__(self, folder: Path, kept: JobFiles) -> None:
        self._folder, self._kept = folder, kept

    @classmethod
    def start(cls, folder: Path, kept: JobFiles, cwd: Path, overrides: Sequence[str]) -> "JobLife":
        """Raises BlockingIOError where one lives already, and OSError where none can be started."""
        lock = kept.lock.open("a")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            kept.ended.unlink(missing_ok=True)
            with kept.output.open("ab") as output, kept.errors.open("wb") as errors:
                process = subprocess.Popen(
                    [sys.executable, "-m", "rubato.actors.cluster.job", str(folder), *overrides],
                    cwd=cwd, env={**os.environ, "PYTHONSAFEPATH": "1"}, stdin=subprocess.DEVNULL,
                    stdout=output, stderr=errors, start_new_session=True, pass_fds=[lock.fileno()],
                )  # fmt: skip
            kept.lock.write_text(str(process.pid))
        finally:
            lock.close()  # the process has it
        life = cls(folder, kept)
        threading.Thread(target=process.wait, daemon=True).start()  # or it would stay a zombie
        return life

    @classmethod
    def found(cls, folder: Path, kept: JobFiles) -> "JobLife | None":
        """The one that a scheduler before this one started, if it still lives."""
        try:
            with kept.lock.open("a") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return cls(folder, kept)
        except FileNotFoundError:
            pass
        return None

    async def ended(self) -> int | None:
        """Its exit code, once it is gone; None where it was killed before it could say one."""
        loop, over = asyncio.get_running_loop(), asyncio.Event()

        def watch() -> None:
            wait_for_lock(self._kept.lock)
            with suppress(RuntimeError):  # the loop is closed: no caller is left
                loop.call_soon_threadsafe(over.set)

        threading.Thread(target=watch, name=f"ended.{self._kept.name}", daemon=True).start()
        await over.wait()
        with suppress(OSError, ValueError):
            return int(self._kept.ended.read_text())
        return None

    def stop(self, number: signal.Signals = signal.SIGINT) -> None:
        """Let it drain and save. The process id is its own for as long as the lock is held."""
        if JobLife.found(self._folder, self._kept) is None:
            return
        with suppress(OSError, ValueError):
            os.kill(int(self._kept.lock.read_text()), number)

    def last_words(self) -> str:
        """The last sentence that it was ended with; empty where it said none."""
        return last_line(self._kept.errors)


def wait_for_lock(path: Path) -> None:
    """Block until the lock at `path` is free."""
    with path.open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)


def opened(path: Path) -> IO[bytes]:
    """A new file that its owner alone reads."""
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb")
