"""Prints what users' programs may rely on, one name a line. `tools/api.py > docs/api.txt` records it; a test compares the two."""

import importlib
import inspect
import re
from collections.abc import Iterator
from enum import Enum, EnumType
from types import ModuleType
from typing import Any, cast

import rubato

PUBLIC = (
    "rubato.actors.envs.calls:said_in",
    "rubato.actors.envs.calls:Said",
    "rubato.actors.envs.calls:Call",
    "rubato.actors.envs.chat",
    "rubato.actors.envs.environment",
    "rubato.actors.envs.frozen_lake",
    "rubato.actors.messages.fabric",
    "rubato.actors.messages.generation",
    "rubato.actors.messages.phases",
    "rubato.actors.messages.samples",
    "rubato.actors.messages.weights",
    "rubato.bus.errors",
    "rubato.bus.message",
    "rubato.planning.relay",
    "rubato.planning.routing",
    "rubato.planning.staleness",
    "rubato.runtime.actor",
    "rubato.runtime.config",
    "rubato.runtime.config.compose:from_mapping",
    "rubato.runtime.config.compose:load",
    "rubato.runtime.embed",
    "rubato.runtime.errors",
    "rubato.runtime.guest",
    "rubato.runtime.kernel:Kernel",
    "rubato.runtime.courier:Ref",
)
"""Modules, or one class of a module. What is not listed may change without notice."""


def lines() -> Iterator[str]:
    """Every public name of these modules with its signature, and the public members of classes."""
    yield from (f"rubato.{name}" for name in rubato.__all__)
    for path in PUBLIC:
        place, _, wanted = path.partition(":")
        module = importlib.import_module(place)
        for name, value in vars(module).items():
            if not name.startswith("_") and wanted in ("", name) and _is_ours(module, value):
                yield from _lines(f"{place}.{name}", value)


def _is_ours(module: ModuleType, value: Any) -> bool:
    return (inspect.isclass(value) or inspect.isfunction(value)) and (value.__module__ + ".").startswith(module.__name__ + ".")


def _lines(path: str, value: Any) -> Iterator[str]:
    if isinstance(value, EnumType):  # its call signature differs between Pythons, and is not used
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
