"""Entry point of one worker process: builds and calls user code as told over a socket, and ends with its parent.

Frames are a little-endian uint32 length and a MessagePack array.
Parent to worker: [id, verb, target, instance, payload], where payload is MessagePack [positional, keyword].
Worker to parent: [id, outcome, payload].

What both ends make of values and errors stands here as well: it needs no process, and is imported without the rest.
"""

import errno
import importlib
import json
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from numbers import Integral, Real
from types import TracebackType
from typing import Any, NamedTuple, NoReturn, Self

import msgspec

DONE, RAISED, UNSENDABLE, MISSING, TOO_LARGE, LEFT, PART = range(7)
"""Outcomes. The payload is the result; or for RAISED [type, repr, where]; or for the others half a sentence. PART ends nothing: it is
[index, outcome, payload] of one of the calls of `each`."""

FOREIGN = 1
"""MessagePack extension: a value that can't be sent; its data is the name of its type."""

MAX_REPLY_BYTES = 10 * 1024 * 1024
"""Of a result, unless `WorkerLimits` says otherwise."""

TEXT_LIMIT = 2_000
"""Characters kept of an exception's text, and of each line of its traceback."""

TRACEBACK_LIMIT = 64 * 1024
"""Characters printed of a traceback, the last ones."""


def main() -> None:
    """Serve until the parent goes away. The one argument holds the settings as JSON."""
    settings = json.loads(sys.argv[1])
    if settings["root"] not in sys.path:
        sys.path.append(settings["root"])
    from runtime.pool.sandbox import WorkerLimits, enter, fork_worker

    limits = WorkerLimits(*settings["limits"])
    init = fork_worker(settings["parent"], settings["uid"], settings["fd"])
    enter(limits, settings["uid"], init)
    os.set_inheritable(settings["fd"], False)
    _serve(socket.socket(fileno=settings["fd"]), UserCode(init), limits.max_reply_bytes)


def _serve(channel: socket.socket, host: "UserCode", max_bytes: int) -> NoReturn:
    os.register_at_fork(after_in_child=channel.close)
    requests = msgspec.msgpack.Decoder(tuple[int, str, str, str, bytes])
    while True:
        call, verb, target, instance, payload = requests.decode(_receive(channel))
        if verb == "each":
            _answer_each(channel, call, host, target, payload, max_bytes)
            continue
        outcome, reply = _answer(host, verb, target, instance, payload, max_bytes)
        if verb != "drop":
            _reply(channel, call, outcome, reply)


def _reply(channel: socket.socket, call: int, outcome: int, reply: bytes) -> None:
    frame = msgspec.msgpack.encode((call, outcome, reply))
    try:
        channel.sendall(len(frame).to_bytes(4, "little") + frame)
    except OSError as error:
        _cut_off(error)


def _answer_each(
    channel: socket.socket, call: int, host: "UserCode", target: str, payload: bytes, max_bytes: int
) -> None:
    """`payload` is the seconds that they may take, and the payload of each."""
    from runtime.pool.each import answer_each

    worker = os.getpid()
    importlib.import_module("asyncio")  # so that not each of its children does
    with Caught(*ENDS):  # the same; what can't be loaded each of them tells
        _load(target)

    def answer(one: bytes) -> tuple[int, bytes]:
        if os.getpid() != worker:
            host.forked()
        return _answer(host, "alone", target, "", one, max_bytes)

    def tell(index: int, outcome: int, reply: bytes) -> None:
        _reply(channel, call, PART, msgspec.msgpack.encode((index, outcome, reply)))

    within_s, calls = msgspec.msgpack.decode(payload, type=tuple[float, list[bytes]])
    answer_each(calls, within_s, answer, tell)
    _reply(channel, call, DONE, b"")


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


class UserCode:
    """The instances of user classes that live in this process, by the key the parent gave them."""

    def __init__(self, init: int) -> None:
        self._instances: dict[str, Any] = {}
        self._runner: Any = None
        self._worker_runner: Any = None
        self._init = init
        self._pid = os.getpid()
        self._known: set[int] = set()

    def leave_if_forked(self) -> None:
        """A child that user code forked has come back from the call as well: only one of the two may answer it."""
        if os.getpid() != self._pid:
            os._exit(0)

    def forked(self) -> None:
        """This process is a child that the worker forked to answer one call."""
        self._pid = os.getpid()
        self._worker_runner, self._runner = (
            self._runner,
            None,
        )  # let go of, it would close what the worker shares with it

    def new_orphans(self) -> dict[int, str]:
        """Processes, by pid, that lost their parent since this was asked last, and still run."""
        from runtime.pool.sandbox import orphans

        found = orphans(self._init)
        new = {pid: name for pid, name in found.items() if pid != self._pid and pid not in self._known}
        self._known = set(found)
        return new

    def act(self, verb: str, target: str, instance: str, payload: bytes) -> object:
        """Carry out one request; raises what the user's code raises, and LoadError for a name that leads nowhere."""
        if verb == "drop":
            return self._instances.pop(instance, None) and None
        if verb == "check":
            return _describe(_load(target), msgspec.msgpack.decode(payload, type=list[str]) if payload else [])
        positional, keyword = msgspec.msgpack.decode(payload, type=tuple[list[Any], dict[str, Any]])
        if verb == "call":
            return self._finish(getattr(self._instances[instance], target)(*positional, **keyword))
        found = self._finish(_load(target)(*positional, **keyword))
        if verb in ("apply", "alone"):
            return found
        self._instances[instance] = found
        return None

    def _finish(self, result: Any) -> object:
        if not hasattr(result, "__await__"):
            return result
        import asyncio

        if self._runner is None:
            self._runner = asyncio.Runner()
        return self._runner.run(_wait_for(result))


async def _wait_for(result: Any) -> object:
    return await result


def encode(value: object) -> bytes:
    """MessagePack of a user's value; other kinds of numbers and texts, decimals and scalars of numpy and torch among them, become plain ones.

    What can't be sent becomes FOREIGN, and a surrogate that stands alone U+FFFD.
    """
    encoder = msgspec.msgpack.Encoder(enc_hook=_plain, decimal_format="number")
    try:
        return encoder.encode(value)
    except UnicodeEncodeError:
        from bus.message import well_formed

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


def _answer(host: UserCode, verb: str, target: str, instance: str, payload: bytes, max_bytes: int) -> tuple[int, bytes]:
    result: object = None
    with Caught(*ENDS) as caught:
        result = host.act(verb, target, instance, payload)
    host.leave_if_forked()
    if caught.error is not None:
        return _failure(caught.error)
    if (left := host.new_orphans()) and verb == "apply":  # a module or an instance may keep a server
        names = ", ".join(f"{name} (pid {pid})" for pid, name in left.items())
        return LEFT, clean(f"left processes running: {names}").encode()
    reply = b""
    with Caught(*ENDS) as caught:  # a user's object may raise while it is read, and integers overflow
        reply = encode(result)
    if caught.error is not None:
        return UNSENDABLE, f"its result can't be sent: {text_of(caught.error)}".encode()
    if len(reply) > max_bytes:
        return TOO_LARGE, f"its result has {len(reply):,} bytes; at most {max_bytes:,} are taken".encode()
    return DONE, reply


def _failure(error: BaseException) -> tuple[int, bytes]:
    from runtime.importer import LoadError

    if isinstance(error, LoadError):
        return MISSING, clean(str(error)).encode()
    print_traceback(error)
    return RAISED, msgspec.msgpack.encode((name_of(error), text_of(error), place_of(error)))


def _load(target: str) -> Callable[..., Any]:
    from runtime.importer import LoadError, load_object

    found = load_object(target)
    if not callable(found):
        raise LoadError(f"{target} is a {type(found).__name__}; a class or function is needed")
    return found


def taken_by(function: Any) -> list[str]:
    """Names of the arguments that a function can be given by keyword; `**` where it takes any, or its signature can't be had."""
    import inspect

    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return ["**"]
    keyword = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [p.name if p.kind in keyword else "**" for p in parameters if p.kind in (*keyword, p.VAR_KEYWORD)]


def _describe(found: Any, names: list[str]) -> dict[str, Any]:
    """What decides where a class runs: `inline` as the class promises it, `asynchronous` where `step` is a coroutine function; what it
    declares of `names`; and what its `reset`, or the function itself, takes by keyword."""
    import inspect

    asynchronous = inspect.iscoroutinefunction(getattr(found, "step", found))
    declared = {name: getattr(found, name) for name in names if hasattr(found, name)}
    inline, takes = getattr(found, "inline", False) is True, taken_by(getattr(found, "reset", found))
    return {"inline": inline, "asynchronous": asynchronous, "declared": declared, "takes": takes}


def _receive(channel: socket.socket) -> bytes:
    size = int.from_bytes(_read(channel, 4), "little")
    return _read(channel, size)


def _read(channel: socket.socket, size: int) -> bytes:
    parts = bytearray()
    while len(parts) < size:
        try:
            part = channel.recv(min(size - len(parts), 1 << 20))
        except OSError as error:
            _cut_off(error)
        if not part:
            _leave()
        parts += part
    return bytes(parts)


def _leave() -> NoReturn:
    """The parent is gone: end at once, running no user code, and take what user code started along."""
    os.killpg(0, signal.SIGKILL)
    os._exit(0)


def _cut_off(error: OSError) -> NoReturn:
    """The parent is gone; or user code closed the socket, which the parent sees: it is about to end this process, and says why."""
    if error.errno in (errno.EPIPE, errno.ECONNRESET):
        _leave()
    while True:
        signal.pause()


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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
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
        lines = [
            line if len(line) <= TEXT_LIMIT else f"{line[:TEXT_LIMIT]}…\n" for line in traceback.format_exception(error)
        ]
        told = "".join(lines)[-TRACEBACK_LIMIT:]
    with suppress(OSError):  # user code closed it
        os.write(2, told.encode(errors="backslashreplace"))


if __name__ == "__main__":
    main()
