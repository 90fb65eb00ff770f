"""What both ends of a worker process make of values and errors of user code; it needs no process."""

import os
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from numbers import Integral, Real
from types import TracebackType
from typing import Any, NamedTuple, Self

import msgspec

FOREIGN = 1
"""MessagePack extension: a value that can't be sent; its data is the name of its type."""

MAX_REPLY_BYTES = 10 * 1024 * 1024
"""Of a result, unless `WorkerLimits` says otherwise."""

TEXT_LIMIT = 2_000
"""Characters kept of an exception's text, and of each line of its traceback."""

TRACEBACK_LIMIT = 64 * 1024
"""Characters printed of a traceback, the last ones."""


class Unsendable(NamedTuple):
    """Stands in a result for a value that no MessagePack type fits."""

    type_name: str


def type_name(value: object) -> str:
    """Name of the type of a value, or of the one that an Unsendable stands for."""
    return value.type_name if isinstance(value, Unsendable) else type(value).__name__


class Traits(NamedTuple):
    """What a class or function says about where it may run."""

    inline: bool
    """It declares `inline = True`: it never blocks and may share the actor's process."""
    asynchronous: bool
    declared: Mapping[str, Any]
    """Those of the attributes asked for that it has."""
    takes: Sequence[str] = ()
    """What a class's `reset`, or a function, can be given by keyword; `**` where it takes any."""


def encode(value: object) -> bytes:
    """MessagePack of a user's value; other kinds of numbers and texts, decimals and scalars of numpy and torch among them, become plain ones.

    What can't be sent becomes FOREIGN, and a surrogate that stands alone U+FFFD.
    """
    encoder = msgspec.msgpack.Encoder(enc_hook=_plain, decimal_format="number")
    try:
        return encoder.encode(value)
    except UnicodeEncodeError:
        from rubato.bus.message import well_formed

        return encoder.encode(well_formed(value))


def encode_call(*positional: object, **keyword: object) -> bytes:
    """Arguments for `apply`, `build` and `call`. Raises TypeError for what MessagePack can't hold."""
    return msgspec.msgpack.encode((positional, keyword))


def decode(reply: bytes) -> Any:
    """A result: MessagePack's types (tuples became lists), with Unsendable in place of anything else."""
    return msgspec.msgpack.decode(reply, ext_hook=_foreign)


def _foreign(code: int, data: memoryview) -> object:
    return Unsendable(bytes(data).decode()) if code == FOREIGN else Unsendable(f"MessagePack extension {code}")


def _plain(value: Any) -> object:
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value)
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        return value.item()
    return msgspec.msgpack.Ext(FOREIGN, type(value).__qualname__.encode())


def taken_by(function: Any) -> list[str]:
    """Names of the arguments that a function can be given by keyword; `**` where it takes any, or its signature can't be had."""
    import inspect

    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return ["**"]
    keyword = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [p.name if p.kind in keyword else "**" for p in parameters if p.kind in (*keyword, p.VAR_KEYWORD)]


ENDS = (SystemExit, KeyboardInterrupt)
"""Exceptions that end a worker."""


class Caught:
    """`with Caught(…) as caught:` keeps in `caught.error` what was raised inside, whatever its base class, unless it is one of those that pass.

    In a worker ENDS pass. No task of ours runs there, so a CancelledError is user code's own.
    """

    error: BaseException | None = None

    def __init__(self, *passes: type[BaseException]) -> None:
        self._passes = passes

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> bool:
        self.error = error
        return not isinstance(error, self._passes)


def clean(text: str) -> str:
    """Its first characters, with escapes for what can't be printed or sent."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text[:TEXT_LIMIT])[:TEXT_LIMIT]


def text_of(error: BaseException) -> str:
    """Its repr, with the file that it is about, which an OSError's own leaves out; or its type where the repr can't be had."""
    with Caught(*ENDS):
        about_file = isinstance(error, OSError) and error.filename is not None
        return clean(f"{type(error).__name__}: {error}" if about_file else repr(error))
    return name_of(error)


def name_of(error: BaseException) -> str:
    return clean(type(error).__name__)


def place_of(error: BaseException) -> str:
    """The last frame as `file:line in function`; empty where there is none."""
    frames = traceback.extract_tb(error.__traceback__)
    return clean(f"{frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name}") if frames else ""


def print_traceback(error: BaseException) -> None:
    """To the worker's stderr, whatever user code made of `sys.stderr`; no line longer than a reader can use."""
    told = text_of(error)
    with Caught(*ENDS):
        lines = [line if len(line) <= TEXT_LIMIT else f"{line[:TEXT_LIMIT]}…\n" for line in traceback.format_exception(error)]
        told = "".join(lines)[-TRACEBACK_LIMIT:]
    with suppress(OSError):  # user code closed it
        os.write(2, told.encode(errors="backslashreplace"))
