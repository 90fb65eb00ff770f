"""Entry point of one worker process: builds and calls user code as told over a socket, and ends with its parent.

Frames are a little-endian uint32 length and a MessagePack array.
Parent to worker: [id, verb, target, instance, payload], where payload is MessagePack [positional, keyword].
Worker to parent: [id, outcome, payload].
"""

import json
import os
import signal
import socket
import sys
from collections.abc import Callable
from typing import Any, NoReturn

import msgspec

DONE, RAISED, UNSENDABLE, MISSING = 0, 1, 2, 3
"""Outcomes. The payload is the result; or for RAISED [type, repr, where]; or for the last two a sentence."""

FOREIGN = 1
"""MessagePack extension: a value that can't be sent; its data is the name of its type."""

TEXT_LIMIT = 2_000
"""Characters kept of an exception's text."""


def main() -> None:
    """Serve until the parent goes away. The one argument holds the settings as JSON."""
    settings = json.loads(sys.argv[1])
    _end_with_parent(settings["parent"])
    _limit_memory(settings["memory_mb"])
    if settings["root"] not in sys.path:
        sys.path.append(settings["root"])
    channel = socket.socket(fileno=settings["fd"])
    host = UserCode()
    requests = msgspec.msgpack.Decoder(tuple[int, str, str, str, bytes])
    while True:
        call, verb, target, instance, payload = requests.decode(_receive(channel))
        outcome, reply = _answer(host, verb, target, instance, payload, settings["max_reply_bytes"])
        if verb != "drop":
            frame = msgspec.msgpack.encode((call, outcome, reply))
            channel.sendall(len(frame).to_bytes(4, "little") + frame)


class UserCode:
    """The instances of user classes that live in this process, by the key the parent gave them."""

    def __init__(self) -> None:
        self._instances: dict[str, Any] = {}
        self._runner: Any = None

    def act(self, verb: str, target: str, instance: str, payload: bytes) -> object:
        """Carry out one request; raises what the user's code raises, and LoadError for a name that leads nowhere."""
        if verb == "drop":
            return self._instances.pop(instance, None) and None
        if verb == "check":
            return _describe(_load(target))
        positional, keyword = msgspec.msgpack.decode(payload, type=tuple[list[Any], dict[str, Any]])
        if verb == "call":
            return self._finish(getattr(self._instances[instance], target)(*positional, **keyword))
        found = self._finish(_load(target)(*positional, **keyword))
        if verb == "apply":
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
    """MessagePack of a user's value; scalars of numpy and torch become numbers, what can't be sent becomes FOREIGN."""
    return msgspec.msgpack.encode(value, enc_hook=_plain)


def _plain(value: Any) -> object:
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        return value.item()
    return msgspec.msgpack.Ext(FOREIGN, type(value).__qualname__.encode())


def _answer(host: UserCode, verb: str, target: str, instance: str, payload: bytes, max_bytes: int) -> tuple[int, bytes]:
    try:
        result = host.act(verb, target, instance, payload)
    except Exception as error:  # noqa: BLE001 - user code may raise anything
        return _failure(error)
    try:
        reply = encode(result)
    except Exception as error:  # noqa: BLE001 - a user's object may raise while it is read, and integers overflow
        return UNSENDABLE, f"its result can't be sent: {_text(error)}".encode()
    if len(reply) > max_bytes:
        return UNSENDABLE, f"its result has {len(reply):,} bytes; at most {max_bytes:,} are taken".encode()
    return DONE, reply


def _failure(error: Exception) -> tuple[int, bytes]:
    import traceback

    from runtime.load import LoadError

    if isinstance(error, LoadError):
        return MISSING, str(error).encode()
    traceback.print_exception(error)
    frames = traceback.extract_tb(error.__traceback__)
    where = f"{frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name}" if frames else ""
    return RAISED, msgspec.msgpack.encode((type(error).__name__, _text(error), where))


def _text(error: Exception) -> str:
    try:
        return repr(error)[:TEXT_LIMIT]
    except Exception:  # noqa: BLE001 - a user's exception may have a broken repr
        return type(error).__name__


def _load(target: str) -> Callable[..., Any]:
    from runtime.load import LoadError, load_object

    found = load_object(target)
    if not callable(found):
        raise LoadError(f"{target} is a {type(found).__name__}; a class or function is needed")
    return found


def _describe(found: Any) -> dict[str, bool]:
    """What decides where a class runs: `inline` as the class promises it, `asynchronous` where `step` is a coroutine function."""
    import inspect

    asynchronous = inspect.iscoroutinefunction(getattr(found, "step", found))
    return {"inline": getattr(found, "inline", False) is True, "asynchronous": asynchronous}


def _receive(channel: socket.socket) -> bytes:
    size = int.from_bytes(_read(channel, 4), "little")
    return _read(channel, size)


def _read(channel: socket.socket, size: int) -> bytes:
    parts = bytearray()
    while len(parts) < size:
        part = channel.recv(min(size - len(parts), 1 << 20))
        if not part:
            _leave()
        parts += part
    return bytes(parts)


def _leave() -> NoReturn:
    """The parent is gone: end at once, running no user code, and take what user code started along."""
    os.killpg(0, signal.SIGKILL)
    os._exit(0)


def _end_with_parent(parent: int) -> None:
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(1, int(signal.SIGKILL))  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        _leave()


def _limit_memory(memory_mb: int) -> None:
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if memory_mb:
        resource.setrlimit(resource.RLIMIT_AS, (memory_mb << 20, memory_mb << 20))


if __name__ == "__main__":
    main()
