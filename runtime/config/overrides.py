"""A config as it is given to a command: a file, or the name of one that is shipped, and key.sub=value overrides."""

import re
from collections.abc import Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

from rubato.bus.address import is_bracketed
from rubato.runtime.config.shipped import shipped
from rubato.runtime.config.source import COMMAND_LINE, ConfigSource, Keys, read_file, set_key
from rubato.runtime.config.yaml_core import NotYaml, read_yaml, scalar
from rubato.runtime.errors import ConfigError

OPENING = ("[", "{", '"', "'")
"""What a list, a mapping and quoted text begin with."""

URL = re.compile(r"([\[,:{]\s*)([a-z]+://\[[0-9A-Fa-f:.]+\][^\s,\[\]{}\"']*)")
"""Within a list one of an IPv6 address, whose brackets are no list of their own."""


def read(path: Path, overrides: Sequence[str] = ()) -> ConfigSource:
    """The file at `path` with `overrides` applied. Raises ConfigError where either can't be read."""
    if not path.exists():
        path = shipped(str(path)) or path
    return _overridden(read_file(path), overrides)


def given(tree: Mapping[str, Any], overrides: Sequence[str] = ()) -> ConfigSource:
    """What a program passed in, with `overrides` applied to a copy. Raises ConfigError where an override can't be read."""
    return _overridden(ConfigSource(deepcopy(dict(tree)), "config", {}), overrides)


def _overridden(source: ConfigSource, overrides: Sequence[str]) -> ConfigSource:
    changed: list[Keys] = []
    for override in overrides:
        if not override.isascii() and override.encode(errors="replace").decode() != override:
            raise ConfigError(f"{COMMAND_LINE}: {ascii(override)[1:-1]} is no text in UTF-8.")
        keys, value = _parsed(override)
        set_key(source.tree, keys, value, override)
        changed.append(keys)
    return source._replace(overridden=frozenset(changed))


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
