"""The fingerprint of a job's message types: two hosts whose code differs on the wire are told apart before they misread each other."""

import hashlib
from collections.abc import Iterable
from typing import Any, cast

import msgspec

from rubato.bus.message import Message
from rubato.runtime import messages
from rubato.runtime.blobs import blob_messages
from rubato.runtime.config.config import Config
from rubato.runtime.launch import agent_messages

IGNORED = frozenset({"default", "default_factory", "cls"})
"""Of a type's description: not on the wire, or described by its other parts."""


def schema_of(config: Config) -> str:
    """Over every message that an actor of the job or a plug-in of one takes or answers with, and those of the runtime; 16 hex digits."""
    actors = [config.actor_class(role) for role in config.actors]
    owners = [*actors, *(plugin for actor in actors for plugin in actor.plugin_classes(config))]
    specs = [spec for owner in owners for spec in owner.handlers.values()]
    found = {message for spec in specs for message in (spec.message, *spec.replies.values())}
    own = (each for module in (messages, agent_messages, blob_messages) for each in vars(module).values())
    return fingerprint(found | {each for each in own if isinstance(each, type) and issubclass(each, Message)})


def fingerprint(types: Iterable[type[Message]]) -> str:
    """Names, order and types of fields count; defaults and docstrings do not."""
    described = sorted(repr(_described(msgspec.inspect.type_info(each), frozenset())) for each in types)
    return hashlib.blake2b("\n".join(described).encode(), digest_size=8).hexdigest()


def _described(value: Any, above: frozenset[type]) -> Any:
    """Nested tuples of names; a type inside itself is named only."""
    if isinstance(value, msgspec.inspect.Type | msgspec.inspect.Field):
        cls = getattr(value, "cls", None)
        if cls in above:
            return cls.__name__
        inner = above | {cls} if isinstance(cls, type) else above
        fields = [f for f in value.__struct_fields__ if f not in IGNORED]
        name = cls.__name__ if isinstance(cls, type) else ""
        return (type(value).__name__, name, *((f, _described(getattr(value, f), inner)) for f in fields))
    if isinstance(value, tuple | list):
        return tuple(_described(each, above) for each in cast("tuple[Any, ...]", value))
    return value.__name__ if isinstance(value, type) else repr(value)
