"""Entry point of one worker process: builds and calls user code as told over a socket, and ends with its parent.

Frames are a little-endian uint32 length and a MessagePack array.
Parent to worker: [id, verb, target, instance, payload], where payload is MessagePack [positional, keyword].
Worker to parent: [id, outcome, payload].

What both ends make of values and errors stands in values.py.
"""

import errno
import importlib
import json
import os
import signal
import socket
import sys
from collections.abc import Callable
from typing import Any, NoReturn

import msgspec

if __name__ == "__main__" and (_root := json.loads(sys.argv[1])["root"]) not in sys.path:
    sys.path.append(_root)

from rubato.runtime.pool.values import ENDS, Caught, clean, encode, name_of, place_of, print_traceback, taken_by, text_of

DONE, RAISED, UNSENDABLE, MISSING, TOO_LARGE, LEFT, PART = range(7)
"""Outcomes. The payload is the result; or for RAISED [type, repr, where]; or for the others half a sentence. PART ends nothing: it is
[index, outcome, payload] of one of the calls of `each`."""


def main() -> None:
    """Serve until the parent goes away. The one argument holds the settings as JSON."""
    settings = json.loads(sys.argv[1])
    from rubato.runtime.pool.sandbox import WorkerLimits, enter, fork_worker

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


def _answer_each(channel: socket.socket, call: int, host: "UserCode", target: str, payload: bytes, max_bytes: int) -> None:
    """`payload` is the seconds that they may take, and the payload of each."""
    from rubato.runtime.pool.each import answer_each

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
        self._worker_runner, self._runner = (self._runner, None)  # let go of, it would close what the worker shares with it

    def new_orphans(self) -> dict[int, str]:
        """Processes, by pid, that lost their parent since this was asked last, and still run."""
        from rubato.runtime.pool.sandbox import orphans

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
    from rubato.runtime.importer import LoadError

    if isinstance(error, LoadError):
        return MISSING, clean(str(error)).encode()
    print_traceback(error)
    return RAISED, msgspec.msgpack.encode((name_of(error), text_of(error), place_of(error)))


def _load(target: str) -> Callable[..., Any]:
    from rubato.runtime.importer import LoadError, load_object

    found = load_object(target)
    if not callable(found):
        raise LoadError(f"{target} is a {type(found).__name__}; a class or function is needed")
    return found


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


if __name__ == "__main__":
    main()
