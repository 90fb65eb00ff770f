"""What the user wrote: a YAML file plus `key.sub=value` overrides, as one tree that remembers where each key stands."""

import re
from collections.abc import Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, cast

from bus.address import is_bracketed
from runtime.config.variables import Filled, Unset, fill_tree, hidden, hides_of
from runtime.config.yaml_core import NotYaml, locate, read_yaml, scalar
from runtime.errors import ConfigError

Keys = tuple[str, ...]
Tree = dict[str, Any]

COMMAND_LINE = "command line"

OPENING = ("[", "{", '"', "'")
"""What a list, a mapping and quoted text begin with."""

URL = re.compile(r"([\[,:{]\s*)([a-z]+://\[[0-9A-Fa-f:.]+\][^\s,\[\]{}\"']*)")
"""Within a list one of an IPv6 address, whose brackets are no list of their own."""

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
                _set(tree, keys, value, name)
            except ConfigError as error:
                raise ConfigError(inner.sentence(keys, str(error).removeprefix(f"{COMMAND_LINE}: "))) from None
        return inner


def _flat(keys: Keys) -> Keys:
    """Keys of single names, where some hold several with dots."""
    return tuple(part for key in keys for part in key.split("."))


def read(path: Path, overrides: Sequence[str] = ()) -> ConfigSource:
    """The file at `path` with `overrides` applied. Raises ConfigError where either can't be read."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(
            f"{path} does not exist. Give the path of a YAML file, e.g. configs/quickstart.yaml."
        ) from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not a text file in UTF-8.") from None
    except IsADirectoryError:
        raise ConfigError(
            f"{path} is a folder, and a config is a file. To go on with the run in it: rubato launch --resume {path}"
        ) from None
    except OSError as error:
        raise ConfigError(f"{path} can't be read: {error.strerror}.") from error
    return _overridden(parse(text, str(path)), overrides)


def given(tree: Mapping[str, Any], overrides: Sequence[str] = ()) -> ConfigSource:
    """What a program passed in, with `overrides` applied to a copy. Raises ConfigError where an override can't be read."""
    return _overridden(ConfigSource(deepcopy(dict(tree)), "config", {}), overrides)


def _overridden(source: ConfigSource, overrides: Sequence[str]) -> ConfigSource:
    changed: list[Keys] = []
    for override in overrides:
        if not override.isascii() and override.encode(errors="replace").decode() != override:
            raise ConfigError(f"{COMMAND_LINE}: {ascii(override)[1:-1]} is no text in UTF-8.")
        keys, value = _parsed(override)
        _set(source.tree, keys, value, override)
        changed.append(keys)
    return source._replace(overridden=frozenset(changed))


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


class ChangedKey(NamedTuple):
    """A dotted key whose value was `old` and is `new`; None on the side that lacks it."""

    key: str
    old: Any
    new: Any

    def sentence(self, form: str) -> str:
        """`form` with its {key}, {old} and {new}; addresses are not spelt out, for one may hold a password."""
        return form.format(key=self.key, old=_briefly(self.old), new=_briefly(self.new))


def differing(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[ChangedKey]:
    """Every key on which two resolved trees differ, in the order of `old`."""
    found: list[ChangedKey] = []
    for key in dict.fromkeys([*old, *new]):
        ours, theirs = old.get(key), new.get(key)
        if isinstance(ours, dict) and isinstance(theirs, dict):
            inner = differing(cast("Tree", ours), cast("Tree", theirs))
            found += [each._replace(key=f"{key}.{each.key}") for each in inner]
        elif ours != theirs:
            found.append(ChangedKey(key, ours, theirs))
    return found


def _briefly(value: Any) -> str:
    text = "not set" if value in (None, "", [], {}) else str(value).lower() if isinstance(value, bool) else str(value)
    return "another address" if "://" in text else text if len(text) <= MAX_SHOWN else text[: MAX_SHOWN - 1] + "…"


def _parsed(override: str) -> tuple[Keys, Any]:
    name, equals, text = override.partition("=")
    keys = tuple(name.strip().split("."))
    if not equals or not all(keys):
        raise ConfigError(f"{override} is not of the form key.sub=value without spaces, e.g. staleness.alpha=1.")
    return keys, _value(name, text.strip(" \t\r\n"))


def _value(name: str, text: str) -> Any:
    """Lists, mappings and quoted text as YAML has them; all else as it stands: a number, true, false, null, or text with whatever is in it."""
    if not text.startswith(OPENING) or is_bracketed(text):
        return scalar(text)
    try:
        return read_yaml(text)
    except NotYaml as error:
        quoted = URL.sub(r'\1"\2"', text)
        if quoted != text:
            return _value(name, quoted)
        raise ConfigError(
            f"{COMMAND_LINE}: the value of {name} is not valid YAML: {text} ({error}). "
            f"Text that begins with {text[0]} stands in quotes: {name}='\"…\"'"
        ) from error


def _set(tree: Tree, keys: Keys, value: Any, override: str) -> None:
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
