"""YAML by the core schema of version 1.2, which has null, booleans, numbers and text alone: text to plain data, and back.

PyYAML reads and writes by version 1.1, where `no`, `12:30:00` and a date are no text and `010` is 8. Its scanner and emitter serve here
under the types of 1.2. Kept from 1.1: a merge key (`<<: *base`).
"""

import re
from collections.abc import Callable, Hashable
from contextlib import suppress
from typing import Any, NoReturn, cast

import yaml
from yaml.constructor import ConstructorError

MAX_CHARS = 1 << 20
"""Of a text: more is no config, and takes long to read."""
MAX_VALUES = 100_000
"""In a text, those behind aliases counted wherever they stand."""

BREAKS = {"\x85": r"\N", "\u2028": r"\L", "\u2029": r"\P"}
"""Line breaks for version 1.1 and characters for 1.2; written as escapes they are the same for every reader."""

_TAG = "tag:yaml.org,2002:"
_MERGE = f"{_TAG}merge"
_RESOLVED = (
    ("merge", r"<<", "<"),
    ("null", r"~|null|Null|NULL|", "~nN\0"),
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", "-+0123456789"),
    ("float", r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?", "-+.0123456789"),
    ("float", r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)", "-+."),
)
"""Tag, pattern and first characters of what is no text; the first that fits holds."""


class _Loader(yaml.SafeLoader):
    """Makes null, booleans, numbers, text, lists and mappings; any other tag is refused, and a key that is given twice."""

    yaml_implicit_resolvers = {}
    yaml_constructors = {}


class _Dumper(yaml.SafeDumper):
    """Quotes text that a reader of version 1.1 or of 1.2 would take for anything else."""

    yaml_implicit_resolvers = {first: list(resolvers) for first, resolvers in yaml.SafeDumper.yaml_implicit_resolvers.items()}

    def ignore_aliases(self, data: object) -> bool:
        return True


def _represent_text(dumper: Any, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar(f"{_TAG}str", text, style='"' if any(c in text for c in BREAKS) else None)


_Dumper.add_representer(str, _represent_text)
for _tag, _pattern, _first in _RESOLVED:
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(f"{_TAG}{_tag}", re.compile(rf"(?:{_pattern})\Z"), [c.strip("\0") for c in _first])  # pyright: ignore[reportUnknownMemberType]


class Located:
    """What a text holds, and the line of each key in it, by the names on the way to the key."""

    def __init__(self, value: object, lines: dict[tuple[str, ...], int]) -> None:
        self.value, self.lines = value, lines


class NotYaml(ValueError):
    """One sentence without a full stop, and the line that it is about; 0 where none is known."""

    def __init__(self, why: str, line: int = 0) -> None:
        super().__init__(" ".join(why.split()))
        self.line = line


def read_yaml(text: str) -> Any:
    """The plain data that `text` holds. Raises NotYaml."""
    return locate(text).value


def locate(text: str) -> Located:
    """The same with lines; of an empty text the value is None. Raises NotYaml."""
    if len(text) > MAX_CHARS:
        raise NotYaml(f"it has {len(text)} characters, and {MAX_CHARS} are allowed")
    for character, escape in BREAKS.items():
        if character in text:
            line = text[: text.index(character)].count("\n") + 1
            raise NotYaml(f'it holds U+{ord(character):04X}: write "{escape}" in double quotes for it', line)
    lines: dict[tuple[str, ...], int] = {}
    loader = cast("Any", None)
    try:
        loader = cast("Any", _Loader(text))  # its stubs are untyped
        node = loader.get_single_node()
        if node is None:
            return Located(None, lines)
        _check(node, (), lines, [0])
        return Located(loader.construct_document(node), lines)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise NotYaml(str(error.problem or error.context), mark.line + 1 if mark is not None else 0) from error
    except RecursionError as error:
        raise NotYaml("it is nested too deeply, or holds itself") from error
    except yaml.reader.ReaderError as error:
        line = text[: error.position].count("\n") + 1
        raise NotYaml(f"it holds the control character U+{ord(text[error.position]):04X}", line) from error
    except NotYaml:
        raise
    except (yaml.YAMLError, ValueError) as error:
        raise NotYaml(str(error)) from error
    finally:
        if loader is not None:
            loader.dispose()


def scalar(text: str) -> Any:
    """What `text` stands for where it is a whole plain scalar: null, a boolean, a number, or itself."""
    for tag, pattern, _ in _RESOLVED:
        if tag != "merge" and re.fullmatch(pattern, text):
            return _SCALARS[tag](text)
    return text


def dump_yaml(tree: object) -> str:
    """`tree` of plain data as YAML that `read_yaml` reads to the same, and readers of version 1.1 too."""
    return yaml.dump(tree, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


# -- parts -----------------------------------------------------------------------------------------------------


def _check(node: yaml.Node, keys: tuple[str, ...], lines: dict[tuple[str, ...], int], seen: list[int]) -> None:
    """Note the line of each key below `node`. Raises NotYaml for a key given twice, and for too much."""
    seen[0] += 1
    if seen[0] > MAX_VALUES:
        raise NotYaml(f"it holds more than {MAX_VALUES} values")
    if isinstance(node, yaml.SequenceNode):
        for number, item in enumerate(cast("list[yaml.Node]", node.value)):
            _check(item, (*keys, str(number)), lines, seen)
    if not isinstance(node, yaml.MappingNode):
        return
    found: dict[object, int] = {}
    for key_node, value_node in cast("list[tuple[yaml.Node, yaml.Node]]", node.value):
        inner = (*keys, str(key_node.value))
        line = key_node.start_mark.line + 1
        key = _key(key_node)
        if key in found:
            raise NotYaml(f"{'.'.join(inner)} is given twice, on lines {found[key]} and {line}")
        found[key] = line
        if key_node.tag != _MERGE:
            lines.setdefault(inner, line)
            _check(value_node, inner, lines, seen)


def _key(node: yaml.Node) -> object:
    """What tells one key of a mapping from another: 1, 0x1 and true are one key of a dict."""
    if not isinstance(node, yaml.ScalarNode):
        raise NotYaml("a key is text, a number, true, false or null, not a list or a mapping", node.start_mark.line + 1)
    name, text = node.tag.removeprefix(_TAG), str(node.value)
    return _construct_scalar(yaml.constructor.SafeConstructor(), node) if name in _SCALARS else (name == "merge", text)


def _int(text: str) -> int:
    base = {"0o": 8, "0x": 16}.get(text[:2])
    return int(text[2:], base) if base else int(text)


def _float(text: str) -> float:
    return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))


_SCALARS: dict[str, Callable[[str], object]] = {
    "null": lambda text: None,
    "bool": lambda text: text.lower() == "true",
    "int": _int,
    "float": _float,
}


def _construct_scalar(loader: Any, node: yaml.ScalarNode) -> object:
    name, text = node.tag.removeprefix(_TAG), str(loader.construct_scalar(node))
    if any(re.fullmatch(pattern, text) for tag, pattern, _ in _RESOLVED if tag == name):
        with suppress(ValueError):  # more digits than Python takes
            return _SCALARS[name](text)
    raise ConstructorError(None, None, f"{text[:60]} is no {name}", node.start_mark)


def _construct_text(loader: Any, node: yaml.ScalarNode) -> str:
    """JSON writes a character beyond U+FFFF as two escapes, a surrogate pair."""
    text: str = loader.construct_scalar(node)
    try:
        return text.encode("utf-16", "surrogatepass").decode("utf-16") if not text.isascii() else text
    except UnicodeDecodeError:
        raise ConstructorError(None, None, "half a surrogate pair is no Unicode", node.start_mark) from None


def _construct_mapping(loader: Any, node: yaml.MappingNode) -> dict[Hashable, object]:
    loader.flatten_mapping(node)
    return loader.construct_mapping(node, deep=True)


def _construct_list(loader: Any, node: yaml.SequenceNode) -> list[object]:
    return loader.construct_sequence(node, deep=True)


def _refuse(loader: Any, node: yaml.Node) -> NoReturn:
    raise ConstructorError(None, None, f"the tag {node.tag.replace(_TAG, '!!')} is not known here", node.start_mark)


_MADE = dict.fromkeys(_SCALARS, _construct_scalar) | {
    "str": _construct_text,
    "merge": _construct_text,  # as a value
    "map": _construct_mapping,
    "seq": _construct_list,
}
for _name, _make in _MADE.items():
    _Loader.add_constructor(f"{_TAG}{_name}", cast("Any", _make))
_Loader.add_constructor(cast("str", None), _refuse)  # all others
