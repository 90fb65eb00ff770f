"""The code that a run keeps: what its config names, and what that imports from its own folder, copied into RUN/code."""

import ast
import os
import re
import shutil
import sys
from collections.abc import Iterator, Mapping
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any, cast

import msgspec

from rubato.runtime.errors import LaunchError
from rubato.runtime.importer import FILE_TARGET, INDEX, NAME, KeptCode, places_of, sources_in

MOST_FILES = 2000

MOST_BYTES = 8 * 1024 * 1024
"""Of one run's code together. More is no user code but a library, which belongs to what is installed."""

MODULE_TARGET = re.compile(r"([A-Za-z_]\w*)(?:\.\w+)*:[A-Za-z_][\w.]*")
"""How a config names code: a file, or a module, whose topmost package is the group."""


def keep(folder: Path, config: Mapping[str, Any]) -> None:
    """Copy the code that `config` names, and what it imports from its own folder, to `folder`; what is there already stays as it is.

    Raises LaunchError where that is too much, or can't be read or written.
    """
    try:
        index = {str(original): copies.name for original, copies in KeptCode(folder).roots.items()}
        wanted = {(root, path) for root, start in _named(config) for path in _with_imports(root, start)}
        size = sum(path.stat().st_size for _, path in wanted)
        if len(wanted) > MOST_FILES or size > MOST_BYTES:
            where = ", ".join(sorted({str(root) for root, _ in wanted}))
            raise LaunchError(
                f"the code that the config names imports {len(wanted)} files of {size >> 20} MiB from {where}, too many to keep with "
                f"the run (at most {MOST_FILES} of {MOST_BYTES >> 20} MiB). Install them as a package."
            )
        for root, path in sorted(wanted):
            copy = folder / index.setdefault(str(root), _fresh_name(root, index)) / path.relative_to(root)
            if not copy.exists():
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, copy)
        if wanted:
            temporary = folder / "files.tmp"  # so that no one reads half of it
            temporary.write_bytes(msgspec.json.encode(index))
            temporary.replace(folder / INDEX)
    except OSError as error:
        raise LaunchError(f"{error.filename} can't be kept with the run: {error.strerror}.") from error


def pack(folder: Path) -> bytes:
    """All that is kept in `folder`, for a host that joins."""
    files = [path for path in [folder / INDEX, *sources_in(folder)] if path.is_file()]
    return msgspec.msgpack.encode({str(path.relative_to(folder)): path.read_bytes() for path in files})


def unpack(packed: bytes, folder: Path) -> None:
    """Write what another host packed. Raises LaunchError for a path that leads out of `folder`."""
    for name, data in msgspec.msgpack.decode(packed, type=dict[str, bytes]).items():
        path = folder / name
        if not Path(os.path.normpath(path)).is_relative_to(folder):
            raise LaunchError(f"the run's code holds a file {name}, which leads out of {folder}: nothing of it was taken.")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


def _named(config: object) -> Iterator[tuple[Path, Path]]:
    """Each folder of user code, and the file or package in it that `config` names."""
    if isinstance(config, dict | list):
        values = cast("dict[str, object]", config).values() if isinstance(config, dict) else cast("list[object]", config)
        for value in values:
            yield from _named(value)
    elif isinstance(config, str) and (found := FILE_TARGET.fullmatch(config)):
        path = Path(found[1]).expanduser().resolve()
        if path.is_file():
            yield path.parent, path
    elif isinstance(config, str) and (found := MODULE_TARGET.fullmatch(config)):
        root = Path.cwd()
        yield from ((root, path) for path in _module(root, found[1]))


def _with_imports(root: Path, start: Path) -> set[Path]:
    """`start` and what it imports from the folder `root`, as far as its text tells."""
    found: set[Path] = set()
    ahead = [start]
    while ahead and len(found) <= MOST_FILES:
        path = ahead.pop()
        if path not in found:
            found.add(path)
            ahead += [file for top in _imported(path) for file in _module(root, top)]
    return found


def _module(root: Path, top: str) -> list[Path]:
    """The files of the module or package `top` in `root`; none where it is not there, or is installed."""
    package, module = root / top, root / f"{top}.py"
    if not (package.is_dir() or module.is_file()) or _is_installed(top, root):
        return []
    if module.is_file() and not (package / "__init__.py").is_file():
        return [module]
    return list(sources_in(package))


def _imported(path: Path) -> set[str]:
    """Topmost packages that the file imports, wherever in it."""
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):
        return set()
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            found.add(node.module.partition(".")[0])
    return found


def _is_installed(top: str, root: Path) -> bool:
    """Whether Python finds a module elsewhere than in the user's own folder `root`."""
    if top == NAME or top in sys.stdlib_module_names:
        return True
    ours = {"", str(Path.cwd()), str(root)}
    for finder in sys.meta_path:
        path = [place for place in sys.path if place not in ours] if finder is PathFinder else None
        spec = None if isinstance(finder, KeptCode) else finder.find_spec(top, path)
        if spec is not None and not any(Path(place).is_relative_to(root / top) for place in places_of(spec)):
            return True
    return False


def _fresh_name(root: Path, index: dict[str, str]) -> str:
    """The folder's own name, where no other's copies have it."""
    name, number = root.name or "root", 1
    while name in index.values():
        number += 1
        name = f"{root.name or 'root'}-{number}"
    return name
