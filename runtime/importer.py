"""User code: loads what a config names (`pkg.mod:Name`, or `path/to/file.py:Name`), and says which key named what is not there.

A run keeps the code that it began with: copied into RUN/code, and imported from there by each of its processes. An edit while the run
goes on changes nothing in it, whichever process is started again. Modules keep the names and file names of the originals, so that
errors and tracebacks name the user's own files, and data files beside them are found.
"""

import ast
import difflib
import hashlib
import importlib
import importlib.util
import os
import re
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib.abc import MetaPathFinder, SourceLoader
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar, cast

import msgspec

from runtime.errors import ConfigError, LaunchError

ClassT = TypeVar("ClassT")

FOLDER = "code"
"""Of the copies, in the run folder."""
INDEX = "files.json"
"""In it: for each folder of originals the name of the folder with its copies."""
VARIABLE = "RUBATO_CODE"
"""Environment variable with the folder of the copies: each process of a run hands it to those that it starts."""
MOST_FILES = 2000
MOST_BYTES = 8 * 1024 * 1024
"""Of one run's code together. More is no user code but a library, which belongs to what is installed."""

OURS = Path(__file__).resolve().parents[1]
PACKAGES = ("actors", "bus", "planning", "runtime", "sim")
"""What is ours is never a user's, also where a job is launched from a checkout of it."""
FILE_TARGET = re.compile(r"([^\s:][^:]*\.py):[A-Za-z_][\w.]*")
MODULE_TARGET = re.compile(r"([A-Za-z_]\w*)(?:\.\w+)*:[A-Za-z_][\w.]*")
"""How a config names code: a file, or a module, whose topmost package is the group."""


class LoadError(ImportError):
    """The name in the config leads to nothing usable; the message is a sentence for the user."""


def load_object(target: str) -> Any:
    """The object that `target` names. Relative file paths and modules that are not installed start at the working folder.

    Raises LoadError when the name is malformed or leads nowhere. What the module itself raises while it is imported passes
    through. The folder user code comes from goes to the end of `sys.path`, so it can hide no installed package.
    """
    place, name = _split(target)
    module = _load_file(Path(place), target) if place.endswith(".py") else _load_module(place, target)
    found: Any = module
    for part in name.split("."):
        if not hasattr(found, part):
            raise LoadError(f"{target} does not exist: {place} defines no {name}")
        found = getattr(found, part)
    return found


def find_module(target: str) -> None:
    """Raises LoadError where `target` is malformed, its module is nowhere, or the module's text is no Python or lacks the name.

    Runs no code of the module or its packages, and so takes a name on trust that the module may make as it runs.
    """
    place, name = _split(target)
    if place.endswith(".py"):
        path = Path(place).expanduser().resolve()
        spec = _file_spec(path.stem, path, target)
    else:
        spec = _spec_of(place)
    if isinstance(spec, str):
        raise LoadError(f"{target} does not exist: there is no module {spec}")
    _check_defines(spec, place, name.partition(".")[0], target)


def has_module(name: str) -> bool:
    """Whether Python finds the module; runs no code of it or its packages."""
    return not isinstance(_spec_of(name), str)


def _spec_of(module: str) -> ModuleSpec | str:
    """How to import `module`, or the part of its name that leads nowhere."""
    _add_folder(Path.cwd())
    top, *rest = module.split(".")
    spec, found = importlib.util.find_spec(top) if top else None, top
    for part in rest:
        if spec is None:
            break
        found = f"{found}.{part}"
        spec = PathFinder.find_spec(found, spec.submodule_search_locations or ())
    return spec or found


def _check_defines(spec: ModuleSpec, place: str, name: str, target: str) -> None:
    """The names in a package may be modules of it: those are not looked for."""
    get_source = getattr(spec.loader, "get_source", None)
    try:
        text = get_source(spec.name) if get_source else None
        tree = ast.parse(text, spec.origin or place) if text is not None else None
    except (SyntaxError, ValueError) as error:
        raise LoadError(f"{target} can't be imported: {type(error).__name__}: {error}") from error
    if tree is not None and (gone := _missing_import(tree, Path(place).expanduser().resolve())):
        raise LoadError(f"{target} can't be imported: it imports {gone}, and there is no such module")
    names = None if tree is None or spec.submodule_search_locations is not None else _top_names(tree)
    if names is not None and name not in names:
        near = difflib.get_close_matches(name, names, n=1)
        guess = f". Did you mean {near[0]}?" if near else ""
        raise LoadError(f"{target} does not exist: {place} defines no {name}{guess}")


def _missing_import(tree: ast.Module, file: Path) -> str:
    """The first package that a user's file imports whatever happens, and that is neither installed nor beside it; else empty."""
    for node in tree.body if file.suffix == ".py" else ():
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module] if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module else []
        for top in (name.partition(".")[0] for name in names):
            beside = (file.parent / top).is_dir() or (file.parent / f"{top}.py").is_file()
            if not beside and isinstance(_spec_of(top), str):
                return top
    return ""


def _top_names(tree: ast.Module) -> set[str] | None:
    """Names that a module has once it is imported; None where its text can't tell."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.alias):
            found.add((node.asname or node.name).partition(".")[0])
    dynamic = {"*", "__getattr__", "globals", "locals", "vars", "setattr", "exec"}
    called = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    return None if dynamic & (found | called) else found


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


def check_module(target: str, *, key: str) -> None:
    """Raises ConfigError where nothing can be at `target`, which `key` of the config names; imports nothing of it."""
    try:
        find_module(target)
    except LoadError as error:
        said = str(error)
        raise ConfigError(f"{key}: {said}{'' if said.endswith('?') else '.'}") from error


def _split(target: str) -> tuple[str, str]:
    place, _, name = target.rpartition(":")
    if not place or not name:
        raise LoadError(f"{target!r} is not of the form package.module:Name or path/to/file.py:Name")
    return place, name


def _load_file(path: Path, target: str) -> ModuleType:
    path = path.expanduser().resolve()
    name = f"rubato_user_{path.stem}_{hashlib.blake2b(str(path).encode(), digest_size=4).hexdigest()}"
    if name in sys.modules:
        return sys.modules[name]
    spec = _file_spec(name, path, target)
    assert spec.loader is not None
    _add_folder(path.parent)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception:
        del sys.modules[name]
        raise
    return module


def _file_spec(name: str, path: Path, target: str) -> ModuleSpec:
    """How to import the file as `name`: the copy that the run keeps of it, where it does."""
    kept = (spec for code in in_use() if (spec := code.spec(name, path)) is not None)
    spec = next(kept, None) or importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise LoadError(f"{target}: {path} can't be imported as Python")
    if spec.loader.__class__ is SourceFileLoader and not path.is_file():
        raise LoadError(f"{target} does not exist: there is no file {path}")
    return spec


def _load_module(name: str, target: str) -> ModuleType:
    _add_folder(Path.cwd())
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not (name == error.name or name.startswith(f"{error.name}.")):
            raise
        raise LoadError(f"{target} does not exist: there is no module {error.name}") from None


def _add_folder(folder: Path) -> None:
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
        return (
            None
            if copy is None
            else importlib.util.spec_from_file_location(name, original, loader=_Copy(original, copy))
        )

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
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
        pairs = [(self.original_of(copy), copy) for copy in _sources(self.folder)]
        return [
            original for original, copy in pairs if original.is_file() and original.read_bytes() != copy.read_bytes()
        ]


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
    files = [path for path in [folder / INDEX, *_sources(folder)] if path.is_file()]
    return msgspec.msgpack.encode({str(path.relative_to(folder)): path.read_bytes() for path in files})


def unpack(packed: bytes, folder: Path) -> None:
    """Write what another host packed. Raises LaunchError for a path that leads out of `folder`."""
    for name, data in msgspec.msgpack.decode(packed, type=dict[str, bytes]).items():
        path = folder / name
        if not Path(os.path.normpath(path)).is_relative_to(folder):
            raise LaunchError(
                f"the run's code holds a file {name}, which leads out of {folder}: nothing of it was taken."
            )
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


def absolute(config: Any) -> Any:
    """`config` with the whole path of each file of code that it names, so that it means the same from every folder."""
    if isinstance(config, dict):
        return {key: absolute(value) for key, value in cast("dict[str, Any]", config).items()}
    if isinstance(config, list):
        return [absolute(value) for value in cast("list[Any]", config)]
    found = FILE_TARGET.fullmatch(config) if isinstance(config, str) else None
    if found is None:
        return config
    path = Path(found[1]).expanduser().resolve()
    return f"{path}{config[len(found[1]) :]}" if path.is_file() else config


def _named(config: object) -> Iterator[tuple[Path, Path]]:
    """Each folder of user code, and the file or package in it that `config` names."""
    if isinstance(config, dict | list):
        values = (
            cast("dict[str, object]", config).values() if isinstance(config, dict) else cast("list[object]", config)
        )
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
    return list(_sources(package))


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
    if top in sys.stdlib_module_names or (root == OURS and top in PACKAGES):
        return True
    ours = {"", str(Path.cwd()), str(root)}
    for finder in sys.meta_path:
        path = [place for place in sys.path if place not in ours] if finder is PathFinder else None
        spec = None if isinstance(finder, KeptCode) else finder.find_spec(top, path)
        if spec is not None and not any(Path(place).is_relative_to(root / top) for place in _places(spec)):
            return True
    return False


def _places(spec: ModuleSpec) -> list[str]:
    """Where a module lies, without the end of its file name."""
    if spec.submodule_search_locations is not None:
        return list(spec.submodule_search_locations)
    return [spec.origin.removesuffix(".py")] if spec.origin else []


def _sources(folder: Path) -> Iterator[Path]:
    return (
        p
        for p in sorted(folder.rglob("*.py"))
        if p.is_file() and not any(part[0] == "." for part in p.relative_to(folder).parts)
    )


def _fresh_name(root: Path, index: dict[str, str]) -> str:
    """The folder's own name, where no other's copies have it."""
    name, number = root.name or "root", 1
    while name in index.values():
        number += 1
        name = f"{root.name or 'root'}-{number}"
    return name
