"""`rubato env make NAME`: an environment of Python's own for a library of environments, which is never installed beside Rubato."""

import argparse
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from rubato.runtime.errors import ConfigError

PINNED: Mapping[str, str] = {"verifiers": "verifiers==0.4.0"}
"""What was tried. Plain pip takes minutes and ends at versions that are years old, so uv resolves."""


def lines(name: str, folder: str, packages: Sequence[str] = (), uv: str = "uv") -> list[list[str]]:
    """The commands that make the environment in `folder`, with `packages` beside the library."""
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    return [
        [uv, "venv", "--allow-existing", "--python", python, folder],
        [uv, "pip", "install", "--python", f"{folder}/bin/python", PINNED[name], *packages],
    ]


def main(argv: Sequence[str]) -> int:
    """Print the commands, or run them; RubatoError is the caller's to print."""
    parser = argparse.ArgumentParser("rubato env", description="Make environments of Python's own for libraries of environments.")
    verbs = parser.add_subparsers(dest="verb", required=True)
    text = "print the commands that make one, or run them"
    make = verbs.add_parser("make", help=text, description=text)
    make.add_argument("name", choices=sorted(PINNED), help="the library")
    make.add_argument("packages", nargs="*", metavar="PACKAGE", help="tasksets and what else goes beside it")
    make.add_argument("--into", default="", metavar="FOLDER", help="default: .venv-NAME")
    make.add_argument("--run", action="store_true", help="run them")
    given = parser.parse_args(list(argv))
    folder = given.into or f".venv-{given.name}"
    if not given.run:
        for line in lines(given.name, folder, given.packages):
            print(shlex.join(line))  # noqa: T201
        return 0
    for line in lines(given.name, folder, given.packages, _uv()):
        if (code := subprocess.run(line, check=False).returncode) != 0:
            raise ConfigError(f"{shlex.join(line)} ended with {code}: what it printed says why.")
    print(f"python: {Path(folder).absolute()}/bin/python")  # noqa: T201
    return 0


def _uv() -> str:
    """Raises ConfigError where there is none."""
    beside = Path(sys.executable).with_name("uv")
    if found := shutil.which("uv") or (str(beside) if beside.is_file() else ""):
        return found
    raise ConfigError("uv is not installed: pip install uv.")
