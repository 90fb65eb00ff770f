"""What a process needs to find its run: the card in the run folder, and the keys with which the run admits other hosts."""

import hashlib
import os
import shlex
from pathlib import Path

import msgspec

from rubato.bus.errors import BadKeys
from rubato.bus.keys import KeyPair, Keys, check_keys
from rubato.runtime.config.source import fill
from rubato.runtime.errors import LaunchError
from rubato.runtime.importer import OURS, PACKAGES

KEYS_FILE = "keys.json"
"""Readable by its owner alone, it outlives every launch of the run."""


class RunCard(msgspec.Struct):
    """`run.json`, readable by its owner alone: it holds the Store's password."""

    id: str
    sockets: str
    """Private folder of this launch's sockets; changes with every launch."""
    state_url: str
    """As the config has it: what `${NAME}` stands for in it is in no file."""
    launcher_pid: int
    started_s: float
    """Wall clock, seconds since the epoch."""
    node: str = "node-1"
    """The node agent of this host."""
    host: str = ""
    """Address of this host as others reach it; empty when they do not."""
    gate: str = ""
    """Where hosts that join reach the Store; empty on a host that joined, and where none can."""
    schema: str = ""
    """Fingerprint of the job's message types, as this launch has them."""
    sources: str = ""
    """That of the files which it has them from: a process that finds others looks at the types itself."""
    stopped_s: float = -1.0
    """Of a launch that is over: what it took from its outcome on until all its actors had ended; -1 while it lasts."""
    checkpoint_s: float = 0.0
    """Of these, what went into the last checkpoint."""

    @property
    def url(self) -> str:
        """`state_url` with its variables. Raises ConfigError where one is not set here."""
        return fill(self.state_url, "state.url").value


def read_card(folder: Path) -> RunCard:
    """How to reach the run in `folder`. Raises LaunchError when there is none."""
    try:
        return msgspec.json.decode((folder / "run.json").read_bytes(), type=RunCard)
    except OSError:
        raise LaunchError(f"{folder} holds no run: there is no run.json in it.") from None
    except msgspec.MsgspecError as error:
        raise LaunchError(f"{folder}/run.json is damaged ({error}). Start the run again with --resume.") from error


def running(folder: Path) -> RunCard:
    """The card of the run in `folder`, which is up. Raises LaunchError when there is none, it is over, or it can't be reached yet."""
    card = read_card(folder)
    if not is_up(card):
        raise LaunchError(f"the run in {folder} is not running. Start it again with: rubato launch --resume {folder}")
    if not card.state_url:
        raise LaunchError(f"the run in {folder} is just starting. Try again in a moment.")
    return card


def is_up(card: RunCard) -> bool:
    """Whether the launcher of this launch still lives on this host."""
    if not Path(card.sockets).is_dir():
        return False
    try:
        os.kill(card.launcher_pid, 0)
    except OSError as error:
        return isinstance(error, PermissionError)
    return True


class RunKeys(msgspec.Struct, frozen=True):
    """`state_password` is the embedded Redis's: kept, so that a resumed run answers to the same token."""

    server: KeyPair
    client: KeyPair
    state_password: str

    @property
    def curve(self) -> Keys:
        return Keys(self.server, self.client)

    def __repr__(self) -> str:
        return f"RunKeys({self.server.public}, {self.client.public})"


def find_keys(folder: Path) -> RunKeys | None:
    """The run's keys, if it has any. Raises LaunchError where others may read them, or they are damaged."""
    path = folder / KEYS_FILE
    try:
        mode = path.stat().st_mode
        if mode & 0o077:
            raise LaunchError(f"{path} may be read by others (mode {mode & 0o777:o}). Close it with: chmod 600 {path}")
        keys = msgspec.json.decode(path.read_bytes(), type=RunKeys)
        check_keys(keys.curve)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise LaunchError(f"{path} can't be read: {error.strerror}.") from error
    except (msgspec.MsgspecError, BadKeys) as error:
        raise LaunchError(f"{path} is damaged ({error}). Make new keys with: {command_for(folder)} --replace") from error
    return keys


def command_for(folder: Path) -> str:
    """What a user types to make keys for the run in `folder`."""
    return f"rubato keys new --run {shlex.quote(str(folder))}"


def sources() -> str:
    """Which files of ours there are, of which length and time: where two processes of a host agree on it, so do their message types."""
    found = sorted(path for package in PACKAGES for path in (OURS / package).rglob("*.py"))
    told = [(str(path), stat.st_size, stat.st_mtime_ns) for path in found if (stat := path.stat())]
    return hashlib.blake2b(repr(told).encode(), digest_size=8).hexdigest()
