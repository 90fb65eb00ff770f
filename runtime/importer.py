"""Loads user code named in a config (`pkg.mod:Name`, or `path/to/file.py:Name`), and says which key named what is not there."""

import difflib
import hashlib
import importlib
import importlib.util
import sys
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from runtime.errors import ConfigError
from runtime.kept_code import in_use

ClassT = TypeVar("ClassT")


class LoadError(ImportError):
    """The name in the config leads to nothing usable; the message is a sentence for the user."""


def load_object(target: str) -> Any:
    """The object that `target` names. Relative file paths and modules that are not installed start at the working folder.

    Raises LoadError when the name is malformed or leads nowhere. What the module itself raises while it is imported passes
    through. The folder user code comes from goes to the end of `sys.path`, so it can hide no installed package.
    """
    place, colon, name = target.rpartition(":")
    if not colon or not place or not name:
        raise LoadError(f"{target!r} is not of the form package.module:Name or path/to/file.py:Name")
    module = _load_file(Path(place), target) if place.endswith(".py") else _load_module(place, target)
    found: Any = module
    for part in name.split("."):
        if not hasattr(found, part):
            raise LoadError(f"{target} does not exist: {place} defines no {name}")
        found = getattr(found, part)
    return found


def find_module(target: str) -> None:
    """Raises LoadError where `target` is malformed or its module is nowhere; runs no code of the module or its packages."""
    place, colon, name = target.rpartition(":")
    if not colon or not place or not name:
        raise LoadError(f"{target!r} is not of the form package.module:Name or path/to/file.py:Name")
    if place.endswith(".py"):
        path = Path(place).expanduser().resolve()
        _file_spec(path.stem, path, target)
        return
    _add_folder(Path.cwd())
    top, *rest = place.split(".")
    spec, found = importlib.util.find_spec(top), top
    for part in rest:
        if spec is None:
            break
        found = f"{found}.{part}"
        spec = PathFinder.find_spec(found, spec.submodule_search_locations or ())
    if spec is None:
        raise LoadError(f"{target} does not exist: there is no module {found}")


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
    """Raises ConfigError where there is no module for `target`, which `key` of the config names; imports nothing of it."""
    try:
        find_module(target)
    except LoadError as error:
        raise ConfigError(f"{key}: {error}.") from error


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
