"""What the user wrote, as one tree that remembers where each key stands.

`${NAME}` in it is filled in from the environment of each process that reads it, and kept as it was written wherever it is shown.
"""

import os
import re
from collections.abc import Iterable, Mapping
from copy import deepcopy
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, cast

from rubato.runtime.config.yaml_core import NotYaml, locate
from rubato.runtime.errors import ConfigError

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


Keys = tuple[str, ...]
Tree = dict[str, Any]

COMMAND_LINE = "command line"

MAX_SHOWN = 60
"""Characters of a value that are quoted."""


class ConfigSource(NamedTuple):
    """The tree and, for error messages, the file, the line of each key in it, the keys that came from overrides, below which it is,
    and what the environment gave.
    """

    tree: Tree
    file: str
    lines: Mapping[Keys, int]
    overridden: frozenset[Keys] = frozenset()
    below: str = ""
    filled: Mapping[str, Filled] = MappingProxyType({})
    """What the environment gave to `tree`, by dotted key."""

    def sentence(self, keys: Keys, text: str) -> str:
        """`text`, led by where the key stands: the file, or the command line; the line number comes last."""
        text = self.hidden(f"{self.below}: {text}" if self.below else text)
        made = keys and keys not in self.lines and any(o[: len(keys)] == keys for o in self.overridden)
        if made or any(keys[: len(o)] == o for o in self.overridden):
            return f"{COMMAND_LINE}: {text}"
        line = next((self.lines[keys[:n]] for n in range(len(keys), 0, -1) if keys[:n] in self.lines), 0)
        return f"{self.file}: {text}" + (f" (line {line})" if line else "")

    def hidden(self, text: str) -> str:
        """`text` without what the environment gave."""
        return hidden(text, hides_of(self.filled.values()))

    def shown(self, keys: Keys, value: object) -> str:
        """`value` of `keys` in a few words: as it is written there, where the environment gave it."""
        given = self.filled.get(".".join(keys))
        text = "empty" if value is None else str(value).lower() if isinstance(value, bool) else repr(value)
        text = repr(given.raw) if given is not None else self.hidden(text)
        return text if len(text) <= MAX_SHOWN else text[: MAX_SHOWN - 1] + "…"

    def filled_in(self) -> "ConfigSource":
        """With its variables filled in from the environment. Raises ConfigError."""
        try:
            tree, filled = fill_tree(self.tree)
        except Unset as error:
            raise ConfigError(self.sentence(error.keys, str(error))) from None
        return self._replace(tree=tree, filled=filled)

    def changed_by(self, changes: Mapping[str, Any], below: Keys) -> "ConfigSource":
        """A copy of `tree`, and `changes` of it, whose dotted keys stand `below` those: sentences about them say so.

        Raises ConfigError where a change is of something inside a plain value.
        """
        tree, num = deepcopy(self.tree), len(below)
        here = {_flat(keys[num:]): line for keys, line in self.lines.items() if keys[:num] == below}
        made = frozenset(_flat(keys[num:]) for keys in self.overridden if keys[:num] == below)
        inner = ConfigSource(tree, self.file, here, made, ".".join(below), self.filled)
        for name, value in changes.items():
            keys = tuple(name.split("."))
            try:
                set_key(tree, keys, value, name)
            except ConfigError as error:
                raise ConfigError(inner.sentence(keys, str(error).removeprefix(f"{COMMAND_LINE}: "))) from None
        return inner


def _flat(keys: Keys) -> Keys:
    """Keys of single names, where some hold several with dots."""
    return tuple(part for key in keys for part in key.split("."))


def read_file(path: Path) -> ConfigSource:
    """The file at `path`. Raises ConfigError where it can't be read."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist. Give the path of a YAML file, or a name that rubato configs lists.") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not a text file in UTF-8.") from None
    except IsADirectoryError:
        raise ConfigError(
            f"{path} is a folder, and a config is a file. To go on with the run in it: rubato launch --resume {path}"
        ) from None
    except OSError as error:
        raise ConfigError(f"{path} can't be read: {error.strerror}.") from error
    return parse(text, str(path))


def parse(text: str, file: str) -> ConfigSource:
    """The tree that the YAML `text` holds; `file` names it in errors."""
    try:
        found = locate(text)
    except NotYaml as error:
        where = f" (line {error.line})" if error.line else ""
        raise ConfigError(f"{file}: not valid YAML: {error}.{where}") from error
    tree = found.value
    if tree is None:
        raise ConfigError(f"{file} is empty.")
    if not isinstance(tree, dict):
        raise ConfigError(f"{file} must hold sections of key: value pairs, not {_kind(tree)}.")
    return ConfigSource(cast("Tree", tree), file, found.lines)


def set_key(tree: Tree, keys: Keys, value: Any, override: str) -> None:
    for depth, key in enumerate(keys[:-1], 1):
        inner = tree.get(key)
        if inner is None:
            inner = tree[key] = {}
        if not isinstance(inner, dict):
            raise ConfigError(f"{COMMAND_LINE}: {override} can't be set: {'.'.join(keys[:depth])} is {_kind(inner)}.")
        tree = cast("Tree", inner)
    tree[keys[-1]] = value


def _kind(value: object) -> str:
    if isinstance(value, dict):
        return "a section"
    return "a list" if isinstance(value, list) else f"the value {value!r}"
