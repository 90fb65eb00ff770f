"""User code: loads what a config names (`pkg.mod:Name`, or `path/to/file.py:Name`), and says which key named what is not there.

A run keeps the code that it began with: copied into RUN/code, and imported from there by each of its processes. An edit while the run
goes on changes nothing in it, whichever process is started again. Modules keep the names and file names of the originals, so that
errors and tracebacks name the user's own files, and data files beside them are found.
"""

import difflib
import hashlib
import importlib
import importlib.util
import os
import re
import sys
from collections.abc import Iterator, Sequence
from importlib.abc import MetaPathFinder, SourceLoader
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar, cast

import msgspec

from rubato.runtime.errors import ConfigError, LaunchError

ClassT = TypeVar("ClassT")

FOLDER = "code"
"""Of the copies, in the run folder."""
INDEX = "files.json"
"""In it: for each folder of originals the name of the folder with its copies."""
VARIABLE = "RUBATO_CODE"
"""Environment variable with the folder of the copies: each process of a run hands it to those that it starts."""

OURS = Path(__file__).resolve().parents[1]
NAME, PACKAGES = "rubato", ("actors", "bus", "planning", "runtime", "sim")
"""What is ours is never a user's, also where a job is launched from a checkout of it. Its packages once had no NAME before theirs."""
FILE_TARGET = re.compile(r"([^\s:][^:]*\.py):[A-Za-z_][\w.]*")


class LoadError(ImportError):
    """The name in the config leads to nothing usable; the message is a sentence for the user."""


def load_object(target: str) -> Any:
    """The object that `target` names. Relative file paths and modules that are not installed start at the working folder.

    Raises LoadError when the name is malformed or leads nowhere. What the module itself raises while it is imported passes
    through. The folder user code comes from goes to the end of `sys.path`, so it can hide no installed package.
    """
    place, name = split_target(target)
    module = _load_file(Path(place), target) if place.endswith(".py") else _load_module(place, target)
    found: Any = module
    for part in name.split("."):
        if not hasattr(found, part):
            raise LoadError(f"{target} does not exist: {place} defines no {name}")
        found = getattr(found, part)
    return found


def load_configured(target: str, *, key: str = "") -> Any:
    """The object at `package.module:Name` or `path/to/file.py:Name`; `key` is the config key that named it.

    Raises ConfigError when there is none, or when its module raises while it is imported.
    """
    said = f"{key}: " if key else ""
    try:
        return load_object(target)
    except LoadError as error:
        raise ConfigError(f"{said}{error}.{_guess(target)}") from error
    except Exception as error:
        raise ConfigError(f"{said}{target} can't be imported: {type(error).__name__}: {error}") from error


def load_class(target: str, base: type[ClassT], *, key: str = "") -> type[ClassT]:
    """Like `load_configured`, for a class that must subclass `base`."""
    found = load_configured(target, key=key)
    if not (isinstance(found, type) and issubclass(found, base)):
        said = f"{key}: " if key else ""
        raise ConfigError(f"{said}{target} is not a subclass of {base.__module__}:{base.__qualname__}.")
    return found


def example(path: str) -> str:
    """`path`, which may be that of a file of examples/ as in a checkout: where no such file is here, of the one that is shipped."""
    ours = OURS / path
    return str(ours) if path.startswith("examples/") and not os.path.exists(path) and ours.is_file() else path


def check_module(target: str, *, key: str) -> None:
    """Raises ConfigError where nothing can be at `target`, which `key` of the config names; imports nothing of it."""
    from rubato.runtime.code_search import find_module  # of no use once the launcher has looked

    try:
        find_module(target)
    except LoadError as error:
        said = str(error)
        raise ConfigError(f"{key}: {said}{'' if said.endswith('?') else '.'}") from error


def split_target(target: str) -> tuple[str, str]:
    place, _, name = target.rpartition(":")
    if not place or not name:
        raise LoadError(f"{target!r} is not of the form package.module:Name or path/to/file.py:Name")
    return example(place), name


def _load_file(path: Path, target: str) -> ModuleType:
    path = path.expanduser().resolve()
    name = f"rubato_user_{path.stem}_{hashlib.blake2b(str(path).encode(), digest_size=4).hexdigest()}"
    if name in sys.modules:
        return sys.modules[name]
    spec = file_spec(name, path, target)
    assert spec.loader is not None
    add_folder(path.parent)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception:
        del sys.modules[name]
        raise
    return module


def file_spec(name: str, path: Path, target: str) -> ModuleSpec:
    """How to import the file as `name`: the copy that the run keeps of it, where it does."""
    kept = (spec for code in in_use() if (spec := code.spec(name, path)) is not None)
    spec = next(kept, None) or importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise LoadError(f"{target}: {path} can't be imported as Python")
    if spec.loader.__class__ is SourceFileLoader and not path.is_file():
        raise LoadError(f"{target} does not exist: there is no file {path}")
    return spec


def _load_module(name: str, target: str) -> ModuleType:
    add_folder(Path.cwd())
    check_name(name, target)
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not (name == error.name or name.startswith(f"{error.name}.")):
            raise
        raise LoadError(f"{target} does not exist: there is no module {error.name}") from None


def check_name(module: str, target: str) -> None:
    """Raises LoadError for a module of ours by its name of before; a user's package may be called as ours were."""
    top = module.partition(".")[0]
    spec = importlib.util.find_spec(top) if top in PACKAGES else None
    if top in PACKAGES and (spec is None or any(Path(place) == OURS / top for place in places_of(spec))):
        raise LoadError(f"{target} is called {NAME}.{target} now")


def add_folder(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.append(str(folder))


def _guess(target: str) -> str:
    """Where the module was found but not the name, the nearest name in it."""
    place, _, name = target.rpartition(":")
    file = str(Path(place).expanduser().resolve()) if place.endswith(".py") else None
    loaded = (m for m in list(sys.modules.values()) if getattr(m, "__file__", None) == file)
    module = next(loaded, None) if file else sys.modules.get(place)
    near = difflib.get_close_matches(name, vars(module), n=1) if module is not None else []
    return f" Did you mean {near[0]}?" if near else ""


# -- what a run keeps ------------------------------------------------------------------------------------------------


class KeptCode(MetaPathFinder):
    """The copies in `folder`, and a finder that Python imports them with."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            index = msgspec.json.decode((folder / INDEX).read_bytes(), type=dict[str, str])
        except FileNotFoundError:
            index = {}
        except (OSError, msgspec.MsgspecError) as error:
            raise LaunchError(f"{folder / INDEX} can't be read ({error}). Start anew in another --run-dir.") from error
        self.roots = {Path(original): folder / name for original, name in index.items()}

    def copy_of(self, original: Path) -> Path | None:
        """Where the copy of a user's file is; None where it is not kept."""
        for root, copies in self.roots.items():
            if original.is_relative_to(root) and (copy := copies / original.relative_to(root)).is_file():
                return copy
        return None

    def original_of(self, copy: Path) -> Path:
        """The user's file, for a path below `folder`."""
        root = next(root for root, copies in self.roots.items() if copy.is_relative_to(copies))
        return root / copy.relative_to(self.roots[root])

    def spec(self, name: str, original: Path) -> ModuleSpec | None:
        """How to import the copy of the file `original` as `name`."""
        copy = self.copy_of(original)
        return None if copy is None else importlib.util.spec_from_file_location(name, original, loader=_Copy(original, copy))

    def find_spec(self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """A module of the user's: at the top of one of his folders, or inside a package that is kept."""
        places = self.roots.values() if path is None else [Path(p) for p in path if Path(p).is_relative_to(self.folder)]
        found = PathFinder.find_spec(fullname, [str(place) for place in places])
        if found is None:
            return None
        if found.origin is None:  # a folder without __init__.py
            return found
        copy = Path(found.origin)
        return importlib.util.spec_from_file_location(
            fullname,
            self.original_of(copy),
            loader=_Copy(self.original_of(copy), copy),
            # What of a package is not kept (an extension module) is found beside the original.
            submodule_search_locations=None
            if found.submodule_search_locations is None
            else [*found.submodule_search_locations, str(self.original_of(copy).parent)],
        )

    def changed(self) -> list[Path]:
        """The originals that are no longer what was kept; one that is gone is no change."""
        pairs = [(self.original_of(copy), copy) for copy in sources_in(self.folder)]
        return [original for original, copy in pairs if original.is_file() and original.read_bytes() != copy.read_bytes()]


class _Copy(SourceLoader):
    """Reads a copy and passes for its original. No bytecode is cached: it would name the copy."""

    def __init__(self, original: Path, copy: Path) -> None:
        self._original, self._copy = str(original), copy

    def get_filename(self, fullname: str) -> str:
        return self._original

    def get_data(self, path: str | bytes) -> bytes:
        return self._copy.read_bytes()

    def path_stats(self, path: str) -> dict[str, int]:
        raise OSError("nothing is cached")


def use(folder: Path) -> None:
    """Let this process import what is kept in `folder`, before anything else of that name."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if getattr(finder, "folder", None) != folder]
    sys.meta_path.insert(0, KeptCode(folder))


def in_use() -> list[KeptCode]:
    """What this process imports user code from; a process of a run is told by its environment."""
    found = [finder for finder in sys.meta_path if isinstance(finder, KeptCode)]
    if not found and (folder := os.environ.get(VARIABLE)):
        use(Path(folder))
        return in_use()
    return found


def runs_user_code() -> bool:
    """Whether this process imported any of what a run keeps."""
    specs = (getattr(module, "__spec__", None) for module in list(sys.modules.values()))
    return any(isinstance(getattr(spec, "loader", None), _Copy) for spec in specs)


def absolute(config: Any) -> Any:
    """`config` with the whole path of each file of code that it names, so that it means the same from every folder."""
    if isinstance(config, dict):
        return {key: absolute(value) for key, value in cast("dict[str, Any]", config).items()}
    if isinstance(config, list):
        return [absolute(value) for value in cast("list[Any]", config)]
    found = FILE_TARGET.fullmatch(config) if isinstance(config, str) else None
    if found is None:
        return config
    path = Path(example(found[1])).expanduser().resolve()
    return f"{path}{config[len(found[1]) :]}" if path.is_file() else config


def places_of(spec: ModuleSpec) -> list[str]:
    """Where a module lies, without the end of its file name."""
    if spec.submodule_search_locations is not None:
        return list(spec.submodule_search_locations)
    return [spec.origin.removesuffix(".py")] if spec.origin else []


def sources_in(folder: Path) -> Iterator[Path]:
    return (p for p in sorted(folder.rglob("*.py")) if p.is_file() and not any(part[0] == "." for part in p.relative_to(folder).parts))


# -- what is imported in a way of our own ---------------------------------------------------------------------------


def import_structlog() -> None:
    """Import structlog without rich, which it loads for a console that processes of our own do not have: 0.2 s of CPU in each.

    Once, before anything else imports it. An embedding program keeps its structlog as it is: it never calls this.
    """
    if "rich" in sys.modules or "structlog" in sys.modules:
        return
    sys.modules["rich"] = None  # pyright: ignore[reportArgumentType]  - what structlog takes for "not installed"
    try:
        importlib.import_module("structlog")
    finally:
        del sys.modules["rich"]
