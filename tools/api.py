"""Prints what users' programs may rely on, one name a line. `tools/api.py > docs/api.txt` records it; a test compares the two."""

import importlib
import inspect
import re
from collections.abc import Iterator
from enum import Enum, EnumType
from types import ModuleType
from typing import Any, cast

PUBLIC = (
    "actors.envs.chat",
    "actors.envs.environment",
    "actors.envs.frozen_lake",
    "actors.messages.fabric",
    "actors.messages.generation",
    "actors.messages.samples",
    "actors.messages.weights",
    "bus.errors",
    "bus.message",
    "planning.relay",
    "planning.routing",
    "planning.staleness",
    "runtime.actor",
    "runtime.config",
    "runtime.embed",
    "runtime.errors",
    "runtime.guest",
    "runtime.kernel:Kernel",
    "runtime.courier:Ref",
)
"""Modules, or one class of a module. What is not listed may change without notice."""


def lines() -> Iterator[str]:
    """Every public name of these modules with its signature, and the public members of classes."""
    for path in PUBLIC:
        place, _, wanted = path.partition(":")
        module = importlib.import_module(place)
        for name, value in vars(module).items():
            if not name.startswith("_") and wanted in ("", name) and _is_ours(module, value):
                yield from _lines(f"{place}.{name}", value)


def _is_ours(module: ModuleType, value: Any) -> bool:
    return (inspect.isclass(value) or inspect.isfunction(value)) and (value.__module__ + ".").startswith(
        module.__name__ + "."
    )


def _lines(path: str, value: Any) -> Iterator[str]:
    if isinstance(value, EnumType):  # how one is called differs between Pythons, and nobody does
        yield from (f"{path}.{member.name}" for member in cast("type[Enum]", value))
        return
    yield f"{path}{_signature(value)}"
    if inspect.isclass(value):
        yield from (f"{path}.{name}" for name in _attributes(value))
        for name, member in vars(value).items():
            if name.startswith("_"):
                continue
            if inspect.isfunction(member):
                yield f"{path}.{name}{_signature(member)}"
            elif isinstance(member, property):
                yield f"{path}.{name}"


def _attributes(found: type) -> set[str]:
    """What its own constructor sets on `self`; fields of structs and models are in their signature."""
    constructor = vars(found).get("__init__")
    if not inspect.isfunction(constructor) or inspect.getsourcefile(constructor) != inspect.getsourcefile(found):
        return set()
    return set(re.findall(r"^ +self\.([a-z]\w*)(?:: [^=]+)? = ", inspect.getsource(constructor), re.MULTILINE))


def _signature(value: Any) -> str:
    """Names of the arguments, with an ellipsis for defaults: types are in the source."""
    try:
        found = inspect.signature(value).parameters.values()
    except (TypeError, ValueError):
        return ""
    shown = [p.replace(annotation=p.empty, default=... if p.default is not p.empty else p.empty) for p in found]
    return str(inspect.Signature(shown)).replace("=Ellipsis", "=…")


if __name__ == "__main__":
    print("\n".join(sorted(lines())))
