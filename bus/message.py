"""Typed messages: frozen structs, one per act, with the reply type written in the request's class."""

import types
from collections.abc import Mapping
from typing import Any, ClassVar, Generic, TypeVar, Union, get_args, get_origin

import msgspec

ReplyT = TypeVar("ReplyT")


class Message(msgspec.Struct, frozen=True, array_like=True):
    """Base of everything sent over the bus. Evolve by appending fields with defaults, never by reordering."""


class Request(Message, Generic[ReplyT], frozen=True):
    """A message that is answered by exactly one `ReplyT` (a message class, or a union of them).

    `idempotent` promises that running it twice with the same fields leaves the same state, so a lost link is retried.
    """

    idempotent: ClassVar[bool] = False


class Ack(Message, frozen=True):
    """The empty reply: the request was carried out."""


def reply_types(request: type[Request[Any]]) -> Mapping[str, type[Message]]:
    """Tag → class of every reply that `request` may get.

    Raises TypeError when the class does not name its reply as `Request[Reply]`.
    """
    for base in getattr(request, "__orig_bases__", ()):
        if get_origin(base) is Request:
            (reply,) = get_args(base)
            members = get_args(reply) if get_origin(reply) in (Union, types.UnionType) else (reply,)
            return {member.__name__: member for member in members}
    raise TypeError(f"{request.__name__} must subclass Request[Reply] directly, naming its reply type")


def tag_of(message: type[Message]) -> str:
    """The name under which a message class travels."""
    return message.__name__
