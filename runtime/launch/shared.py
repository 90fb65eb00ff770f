"""The shared scope of a run: keys beside its own, on its own server, for jobs that it serves. They reach these keys and no others."""

import hashlib
import os
from pathlib import Path

import msgspec

from rubato.runtime.config.source import fill
from rubato.runtime.errors import LaunchError
from rubato.runtime.launch.folder import write_private
from rubato.runtime.store.redis import RedisStore

FILE = "cluster.json"
"""In the run folder, readable by its owner alone: it holds a password."""


class SharedScope(msgspec.Struct, frozen=True):
    """How the scope is reached."""

    id: str
    """Keys are `rubato:{id}:…`."""
    state_url: str
    replicated: bool = False
    """Whether its changes wait for a replica."""


def scope_of(run_id: str) -> str:
    """The shared scope of a run. It is no run's id: those end in hexadecimal digits."""
    return f"{run_id}.shared"


def password_for(password: str) -> str:
    """Password of the jobs that share a server whose owner has `password`: the same at each start; the owner's can't be found from it."""
    return hashlib.blake2b(password.encode(), digest_size=24, person=b"rubato-shared").hexdigest()


def write_shared(folder: Path, scope: SharedScope) -> None:
    """Publish it atomically, 0600."""
    write_private(folder / FILE, scope)


def open_shared(folder: Path, **options: float) -> RedisStore:
    """The shared scope of the run in `folder`; `options` are those of RedisStore. Raises LaunchError where it shares none."""
    path = folder / FILE
    try:
        mode = path.stat().st_mode
        if mode & 0o077:
            raise LaunchError(f"{path} may be read by others (mode {mode & 0o777:o}). Close it with: chmod 600 {path}")
        scope = msgspec.json.decode(path.read_bytes(), type=SharedScope)
    except OSError as error:
        why = os.strerror(error.errno or 0)
        raise LaunchError(f"{folder} shares nothing: {FILE} can't be read ({why}). Is it a cluster's folder?") from None
    except msgspec.MsgspecError as error:
        raise LaunchError(f"{path} is damaged ({error}). Start the cluster again.") from error
    return RedisStore(fill(scope.state_url, "state.url").value, scope.id, replicated=scope.replicated, **options)
