"""What the user wrote: a YAML file plus `key.sub=value` overrides, as one tree that remembers where each key stands."""

import re
from collections.abc import Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple, cast

import yaml

from runtime.errors import ConfigError

Keys = tuple[str, ...]
Tree = dict[str, Any]

COMMAND_LINE = "command line"

FLOAT = re.compile(r"^[-+]?(\d[\d_]*\.?[\d_]*|\.\d[\d_]*)[eE][-+]?\d+$")
"""YAML 1.1 takes 5e-4 for a string, for want of a dot; people write it and mean a number."""

MAX_SHOWN = 60
"""Characters of a value that are quoted."""


class ConfigSource(NamedTuple):
    """The tree and, for error messages, the file, the line of each key in it, the keys that came from overrides, and below which it is."""

    tree: Tree
    file: str
    lines: Mapping[Keys, int]
    overridden: frozenset[Keys] = frozenset()
    below: str = ""

    def sentence(self, keys: Keys, text: str) -> str:
        """`text`, led by where the key stands: the file, or the command line; the line number comes last."""
        text = f"{self.below}: {text}" if self.below else text
        made = keys and keys not in self.lines and any(o[: len(keys)] == keys for o in self.overridden)
        if made or any(keys[: len(o)] == o for o in self.overridden):
            return f"{COMMAND_LINE}: {text}"
        line = next((self.lines[keys[:n]] for n in range(len(keys), 0, -1) if keys[:n] in self.lines), 0)
        return f"{self.file}: {text}" + (f" (line {line})" if line else "")

    def changed_by(self, changes: Mapping[str, Any], below: Keys) -> "ConfigSource":
        """A copy of `tree`, and `changes` of it, whose dotted keys stand `below` those: sentences about them say so.

        Raises ConfigError where a change is of something inside a plain value.
        """
        tree, num = deepcopy(self.tree), len(below)
        here = {_flat(keys[num:]): line for keys, line in self.lines.items() if keys[:num] == below}
        made = frozenset(_flat(keys[num:]) for keys in self.overridden if keys[:num] == below)
        inner = ConfigSource(tree, self.file, here, made, ".".join(below))
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


class _Loader(yaml.SafeLoader):
    """SafeLoader that knows 5e-4."""


cast("Any", _Loader).add_implicit_resolver("tag:yaml.org,2002:float", FLOAT, list("-+0123456789."))


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
        keys, value = _parsed(override)
        _set(source.tree, keys, value, override)
        changed.append(keys)
    return source._replace(overridden=frozenset(changed))


def parse(text: str, file: str) -> ConfigSource:
    """The tree that the YAML `text` holds; `file` names it in errors."""
    lines: dict[Keys, int] = {}
    loader = cast("Any", _Loader(text))  # its stubs are untyped
    try:
        node = loader.get_single_node()
        if node is None:
            raise ConfigError(f"{file} is empty.")
        _note_lines(node, (), lines, file)
        tree = cast("object", loader.construct_document(node))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f" (line {mark.line + 1})" if mark is not None else ""
        raise ConfigError(f"{file}: not valid YAML: {error.problem or error.context}.{where}") from error
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise ConfigError(f"{file}: not valid YAML: {error}.") from error
    finally:
        loader.dispose()
    if not isinstance(tree, dict):
        raise ConfigError(f"{file} must hold sections of key: value pairs, not {_kind(tree)}.")
    return ConfigSource(cast("Tree", tree), file, lines)


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
    try:
        return keys, yaml.load(text, _Loader)
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"{COMMAND_LINE}: the value of {name} is not valid YAML: {text}") from error


def _set(tree: Tree, keys: Keys, value: Any, override: str) -> None:
    for depth, key in enumerate(keys[:-1], 1):
        inner = tree.get(key)
        if inner is None:
            inner = tree[key] = {}
        if not isinstance(inner, dict):
            raise ConfigError(f"{COMMAND_LINE}: {override} can't be set: {'.'.join(keys[:depth])} is {_kind(inner)}.")
        tree = cast("Tree", inner)
    tree[keys[-1]] = value


def _note_lines(node: yaml.Node, keys: Keys, lines: dict[Keys, int], file: str) -> None:
    if not isinstance(node, yaml.MappingNode):
        return
    for key_node, value_node in cast("list[tuple[yaml.Node, yaml.Node]]", node.value):
        if key_node.tag == "tag:yaml.org,2002:merge":
            continue
        inner = (*keys, str(key_node.value))
        line = key_node.start_mark.line + 1
        if inner in lines:
            raise ConfigError(f"{file}: {'.'.join(inner)} is given twice, on lines {lines[inner]} and {line}.")
        lines[inner] = line
        _note_lines(value_node, inner, lines, file)


def _kind(value: object) -> str:
    if isinstance(value, dict):
        return "a section"
    return "a list" if isinstance(value, list) else f"the value {value!r}"
