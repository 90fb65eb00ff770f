"""`${NAME}` in a config: filled in from the environment of each process that reads it, and kept as it was written wherever it is shown."""

import os
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, cast

from runtime.errors import ConfigError

VARIABLE = re.compile(r"(\$?)\$\{([A-Za-z_][A-Za-z0-9_]*)(?::-([^}]*))?\}")
"""`${NAME}`, `${NAME:-what stands for one that is not set or empty}`; `$${NAME}` is the text `${NAME}`."""

SHORTEST_HIDDEN = 4
"""Characters. What is shorter is no secret, and would be found within other words."""


class Unset(ConfigError):
    """A variable that the config key `key` names is not in the environment."""

    def __init__(self, text: str, keys: tuple[str, ...]) -> None:
        super().__init__(text)
        self.keys = keys


class Filled(NamedTuple):
    """A text as the config has it, what it stands for, and the values of the variables in it by their own spelling."""

    raw: str
    value: str
    parts: Mapping[str, str]


def fill(text: str, key: str) -> Filled:
    """`text` of the config key `key` with its variables. Raises Unset with the key and the name."""
    parts: dict[str, str] = {}

    def one(found: re.Match[str]) -> str:
        escaped, name, default = found.groups()
        if escaped:
            return found[0][1:]
        value = os.environ.get(name)
        if not value and default is not None:
            return default
        if value is None:
            told = f"{key} names ${{{name}}}, and the environment here has no {name}. Set it, or write $${{{name}}} for the text"
            raise Unset(f"{told} itself.", tuple(key.split(".")))
        parts[found[0]] = value
        return value

    return Filled(text, VARIABLE.sub(one, text), parts)


def fill_tree(tree: Any, above: str = "") -> tuple[Any, dict[str, Filled]]:
    """`tree` with the variables of all its texts, and what was filled by dotted key. Raises Unset."""
    found: dict[str, Filled] = {}

    def walk(value: Any, key: str) -> Any:
        if isinstance(value, dict):
            return {name: walk(inner, _below(key, name)) for name, inner in cast("dict[Any, Any]", value).items()}
        if isinstance(value, list | tuple):
            return [walk(inner, _below(key, number)) for number, inner in enumerate(cast("list[Any]", value))]
        if isinstance(value, str) and VARIABLE.search(value):
            found[key] = fill(value, key)
            return found[key].value
        return value

    return walk(tree, above), found


def unfilled(tree: Any, filled: Mapping[str, Filled]) -> Any:
    """`tree` with each of `filled` as the config has it. Raises ConfigError where one is not at its key any more."""
    there: set[str] = set()

    def walk(value: Any, key: str) -> Any:
        if key in filled:
            there.add(key)
            return filled[key].raw
        if isinstance(value, dict):
            return {name: walk(inner, _below(key, name)) for name, inner in cast("dict[Any, Any]", value).items()}
        if isinstance(value, list):
            return [walk(inner, _below(key, number)) for number, inner in enumerate(cast("list[Any]", value))]
        return value

    made = walk(tree, "")
    if lost := sorted(filled.keys() - there):
        raise ConfigError(f"{lost[0]} can't be filled in from the environment. Write its value there instead.")
    return made


def hidden(text: str, hides: Mapping[str, str]) -> str:
    """`text` with the variable instead of its value, wherever that stands in it. `hides` is value → spelling."""
    for value, spelling in hides.items():
        text = text.replace(value, spelling)
    return text


def hides_of(filled: Iterable[Filled]) -> dict[str, str]:
    """Value → spelling, the longest first; also as a value is written within quotes, and a secret of several lines by each line."""
    found: dict[str, str] = {}
    for spelling, value in ((spelling, value) for each in filled for spelling, value in each.parts.items()):
        for form in (value, repr(value)[1:-1], *value.splitlines()):
            if len(form.strip()) >= SHORTEST_HIDDEN:
                found.setdefault(form.strip(), spelling)
    return dict(sorted(found.items(), key=lambda item: -len(item[0])))


def _below(above: str, name: object) -> str:
    return f"{above}.{name}" if above else str(name)
