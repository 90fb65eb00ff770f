"""Prints every message that actors exchange, as JSON for clients in other languages. `tools/messages.py > docs/messages.json`
records it; a test compares the two.

`messages` and `structs` are keyed by class name: a message's is the tag under which it travels. `fields` stand in the order in which they
travel, in a struct with a `tag` after that; one with a `default` may be left out at the end. `replies` are the tags of what may answer; a
message without them is not answered.
"""

import importlib
import json
import pkgutil
import types
from collections.abc import Iterator
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec

import rubato.actors.messages
from rubato.bus.message import Message, Request, reply_types

MODULES = (
    "rubato.bus.message",
    "rubato.runtime.messages",
    "rubato.runtime.launch.agent_messages",
    "rubato.runtime.blobs.blob_messages",
    "rubato.runtime.blobs.parts",
)


def described() -> dict[str, Any]:
    """What `docs/messages.json` holds."""
    messages = sorted(_messages(), key=lambda message: message.__name__)
    structs: dict[str, type[msgspec.Struct]] = {}
    for message in messages:
        _nested(message, structs)
    return {
        "messages": {message.__name__: _message(message) for message in messages},
        "structs": {name: _struct(struct) for name, struct in sorted(structs.items())},
    }


def _struct(struct: type[msgspec.Struct]) -> dict[str, Any]:
    tag = struct.__struct_config__.tag
    return {"fields": _fields(struct)} | ({} if tag is None else {"tag": tag})


def _messages() -> Iterator[type[Message]]:
    within = (f"rubato.actors.messages.{module.name}" for module in pkgutil.iter_modules(rubato.actors.messages.__path__))
    for path in (*MODULES, *within):
        for value in vars(importlib.import_module(path)).values():
            ours = isinstance(value, type) and issubclass(value, Message) and value.__module__ == path
            if ours and value not in (Message, Request):
                yield value


def _message(message: type[Message]) -> dict[str, Any]:
    found: dict[str, Any] = {"module": message.__module__, "fields": _fields(message)}
    if issubclass(message, Request):
        found["replies"] = sorted(reply_types(message))
        found["idempotent"] = message.idempotent
    return found


def _fields(struct: type) -> list[dict[str, Any]]:
    hints = get_type_hints(struct)
    return [_field(field, hints[field.name]) for field in msgspec.structs.fields(struct)]


def _field(field: msgspec.structs.FieldInfo, hint: Any) -> dict[str, Any]:
    found = {"name": field.name, "type": _type_name(hint)}
    if not field.required:
        default = field.default if field.default is not msgspec.NODEFAULT else field.default_factory()
        found["default"] = msgspec.to_builtins(default, enc_hook=lambda buffer: bytes(buffer.data))
    return found


def _type_name(hint: Any) -> str:
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return " | ".join(map(_type_name, inner))
    if origin is Literal:
        return " | ".join(map(repr, inner))
    if origin is not None:
        return f"{origin.__name__}[{', '.join('…' if each is ... else _type_name(each) for each in inner)}]"
    return "nil" if hint is type(None) else getattr(hint, "__name__", str(hint))


def _nested(hint: Any, found: dict[str, type[msgspec.Struct]]) -> None:
    """Adds the structs that fields of `hint` hold, which are no messages of their own."""
    for inner in get_args(hint):
        _nested(inner, found)
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct) and hint.__name__ not in found:
        if not issubclass(hint, Message):
            found[hint.__name__] = hint
        for each in get_type_hints(hint).values():
            _nested(each, found)


def text() -> str:
    """One class a line, so that a change reads as one."""
    parts = [
        f"{json.dumps(part)}: {{\n" + ",\n".join(f"{json.dumps(k)}: {json.dumps(v, ensure_ascii=False)}" for k, v in rows.items())
        for part, rows in described().items()
    ]
    return "{" + "\n},\n".join(parts) + "\n}}"


if __name__ == "__main__":
    print(text())
