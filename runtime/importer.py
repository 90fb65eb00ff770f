"""Loads what a config names by import path, and turns a wrong path into a ConfigError that names the key."""

import difflib
import sys
from pathlib import Path
from typing import Any, TypeVar

from runtime.errors import ConfigError
from runtime.load import LoadError, find_module
from runtime.load import load_object as find_object

ClassT = TypeVar("ClassT")


def load_object(target: str, *, key: str = "") -> Any:
    """The object at `package.module:Name` or `path/to/file.py:Name`; `key` is the config key that named it.

    Raises ConfigError when there is none, or when its module raises while it is imported.
    """
    said = f"{key}: " if key else ""
    try:
        return find_object(target)
    except LoadError as error:
        raise ConfigError(f"{said}{error}.{_guess(target)}") from error
    except Exception as error:
        raise ConfigError(f"{said}{target} can't be imported: {type(error).__name__}: {error}") from error


def load_class(target: str, base: type[ClassT], *, key: str = "") -> type[ClassT]:
    """Like `load_object`, for a class that must subclass `base`."""
    found = load_object(target, key=key)
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


def _guess(target: str) -> str:
    """Where the module was found but not the name, the nearest name in it."""
    place, _, name = target.rpartition(":")
    file = str(Path(place).expanduser().resolve()) if place.endswith(".py") else None
    loaded = (m for m in list(sys.modules.values()) if getattr(m, "__file__", None) == file)
    module = next(loaded, None) if file else sys.modules.get(place)
    near = difflib.get_close_matches(name, vars(module), n=1) if module is not None else []
    return f" Did you mean {near[0]}?" if near else ""
