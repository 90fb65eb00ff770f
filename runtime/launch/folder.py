"""The run folder: where a run keeps what outlives its processes, and how others find it."""

import fcntl
import json
import os
import secrets
import shutil
import tempfile
from pathlib import Path
from typing import IO

import msgspec

from runtime.clock import wall_s
from runtime.errors import LaunchError
from runtime.keys import FILE as KEYS_FILE

PREFIX = "rubato-"
"""Of folders of sockets."""
MAX_TEMPORARY_BYTES = 60
"""Of the folder for temporary files: the system allows some 107 bytes for a socket's path, and actors' names need the rest."""


class RunCard(msgspec.Struct):
    """`run.json`, readable by its owner alone: it holds the Store's password."""

    id: str
    sockets: str
    """Private folder of this launch's sockets; changes with every launch."""
    state_url: str
    launcher_pid: int
    started_s: float
    """Wall clock, seconds since the epoch."""
    launches: int = 1
    node: str = "node-1"
    """The node agent of this host."""
    host: str = ""
    """Address of this host as others reach it; empty when they do not."""
    gate: str = ""
    """Where hosts that join reach the Store; empty on a host that joined, and where none can."""


class RunFolder:
    """Owns the lock of a run folder while a launcher runs in it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: IO[str] | None = None
        self._sockets: Path | None = None

    @property
    def config(self) -> Path:
        return self.path / "config.yaml"

    @property
    def card(self) -> Path:
        return self.path / "run.json"

    def open(self, *, resume: bool, force: bool) -> RunCard:
        """Take the folder for a launch. Raises LaunchError when it holds a run and neither flag allows for that."""
        _check_temporary(tempfile.gettempdir())
        held = any((self.path / name).exists() for name in ("metrics.jsonl", "config.yaml", "run.json"))
        if resume and not self.config.exists():
            raise LaunchError(f"{self.path} holds no run to resume. Leave --resume out to start one there.")
        if held and not (resume or force):
            raise LaunchError(
                f"{self.path} already holds a run{self._standing()}. Add --resume to go on, --force to overwrite, or another --run-dir."
            )
        self._take_lock()
        previous = self._previous(needed=resume)
        if force and not resume:
            self._clear()
            previous = None
        (self.path / "logs").mkdir(exist_ok=True)
        self._sockets = Path(tempfile.mkdtemp(prefix=PREFIX))
        run_id = previous.id if previous else f"{self.path.name}-{secrets.token_hex(4)}"
        launches = previous.launches + 1 if previous else 1
        gate = previous.gate if previous else ""
        return RunCard(run_id, str(self._sockets), "", os.getpid(), wall_s(), launches=launches, gate=gate)

    def write(self, card: RunCard) -> None:
        """Publish the card atomically, 0600."""
        temporary = self.card.with_suffix(".tmp")
        with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(msgspec.json.encode(card))
        temporary.replace(self.card)

    def close(self) -> None:
        """Release the folder; the sockets go, everything else stays."""
        if self._sockets is not None:
            shutil.rmtree(self._sockets, ignore_errors=True)
        if self._lock is not None:
            self._lock.close()

    def _previous(self, *, needed: bool) -> RunCard | None:
        """The card of the launch before, whose sockets are cleared away: we hold the lock, so that launch is over."""
        try:
            previous = read_card(self.path)
        except LaunchError:
            if needed and self.card.exists():
                raise
            return None
        if Path(previous.sockets).name.startswith(PREFIX):
            shutil.rmtree(previous.sockets, ignore_errors=True)
        return previous

    def _take_lock(self) -> None:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = (self.path / ".lock").open("w")
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise LaunchError(f"{self.path} is running already. Watch it with: rubato monitor {self.path}") from None
        except OSError as error:
            raise LaunchError(
                f"{self.path} can't be used as a run folder: {error.strerror}. Choose another with --run-dir."
            ) from error

    def _clear(self) -> None:
        for entry in self.path.iterdir():
            if entry.name in (".lock", KEYS_FILE):
                continue
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            else:
                entry.unlink()

    def _standing(self) -> str:
        try:
            last = (self.path / "metrics.jsonl").read_text().splitlines()[-1]
            return f" (step {int(json.loads(last)['step'])})"
        except (OSError, IndexError, ValueError, KeyError, TypeError):
            return ""


def read_card(folder: Path) -> RunCard:
    """How to reach the run in `folder`. Raises LaunchError when there is none."""
    try:
        return msgspec.json.decode((folder / "run.json").read_bytes(), type=RunCard)
    except OSError:
        raise LaunchError(f"{folder} holds no run: there is no run.json in it.") from None
    except msgspec.MsgspecError as error:
        raise LaunchError(f"{folder}/run.json is damaged ({error}). Start the run again with --resume.") from error


def is_up(card: RunCard) -> bool:
    """Whether the launcher of this launch still lives on this host."""
    if not Path(card.sockets).is_dir():
        return False
    try:
        os.kill(card.launcher_pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _check_temporary(folder: str) -> None:
    if len(os.fsencode(folder)) > MAX_TEMPORARY_BYTES:
        raise LaunchError(f"{folder} is too long for the paths of sockets. Set TMPDIR=/tmp.")
