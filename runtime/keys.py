"""The keys of a run: one file in its folder, readable by its owner alone, that outlives every launch of the run."""

import os
import secrets
import shlex
from pathlib import Path

import msgspec

from bus.errors import BadKeys
from bus.keys import KeyPair, Keys, check_keys, new_keys
from runtime.errors import LaunchError

FILE = "keys.json"


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


def make_keys(folder: Path, *, replace: bool = False) -> RunKeys:
    """Write fresh keys into `folder`, which is made if need be. Raises LaunchError where keys are and may not be replaced."""
    path = folder / FILE
    if os.path.exists(path) and not replace:  # unlike Path.exists, it takes a name too long for an answer
        raise LaunchError(
            f"{path} exists: the run's hosts know these keys. Add --replace for new ones; the old token is void then, and a "
            "running job goes on with the old keys until it is resumed."
        )
    keys = RunKeys(*new_keys(), secrets.token_urlsafe(32))
    write_keys(folder, keys)
    return keys


def write_keys(folder: Path, keys: RunKeys) -> None:
    """Atomically, 0600, in a folder that is made 0700 if it is new."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        temporary = folder / f"{FILE}.tmp"
        with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(msgspec.json.encode(keys))
        temporary.replace(folder / FILE)
    except OSError as error:
        raise LaunchError(f"the keys can't be written to {folder}: {error.strerror}.") from error


def find_keys(folder: Path) -> RunKeys | None:
    """The run's keys, if it has any. Raises LaunchError where others may read them, or they are damaged."""
    path = folder / FILE
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
        raise LaunchError(
            f"{path} is damaged ({error}). Make new keys with: {command_for(folder)} --replace"
        ) from error
    return keys


def command_for(folder: Path) -> str:
    """What a user types to make keys for the run in `folder`."""
    return f"rubato keys new --run {shlex.quote(str(folder))}"
