"""Listens at an ipc address: takes in the peers that come over a Unix socket, counts strangers, and says whose link has ended."""

import asyncio
import contextlib
import itertools
import os
import socket
from collections.abc import Callable, Sequence
from functools import partial

from bus import limits
from bus.address import check_free, parse
from bus.end import Came, Left, Rest
from bus.errors import BadAddress
from bus.refusals import Refusals
from bus.stream import Stream

ACCEPTED_AT_ONCE = 64

BACKLOG = 1024
"""Connections that the kernel holds between two turns of the loop."""

PAUSE_S = 1.0
"""Nobody is taken in for so long after the process ran out of descriptors."""


class _Visitor:
    """A connection that a peer opened. It has a link once its first message is here."""

    __slots__ = ("has_link", "name", "stream", "timer")

    def __init__(self, name: bytes, timer: asyncio.TimerHandle) -> None:
        self.name = name
        self.timer = timer
        self.has_link = False
        self.stream: Stream


class StreamDoor:
    """The listening socket and the streams that came by it."""

    def __init__(
        self,
        address: str,
        loop: asyncio.AbstractEventLoop,
        came: Came,
        left: Left,
        refusals: Refusals,
        drained: Callable[[], None],
    ) -> None:
        """Raises BadAddress when the address cannot be bound."""
        self._path = parse(address).place
        self._loop = loop
        self._came, self._left, self._drained = came, left, drained
        self._refusals = refusals
        self._visitors: dict[bytes, _Visitor] = {}
        self._names = itertools.count(1)
        self._most = limits.most_connections()
        self._listener = _bound(address)
        loop.add_reader(self._listener.fileno(), self._accept)

    def beat(self) -> None:
        """To be called at each heartbeat."""
        for visitor in list(self._visitors.values()):
            visitor.stream.beat()

    def close(self) -> list[Rest]:
        """Close everything; what is returned is still to be called, and lets the last words leave."""
        if self._listener.fileno() < 0:
            return []
        self._loop.remove_reader(self._listener.fileno())
        # The file stays behind otherwise. While we still listen on it nobody else can have taken the path.
        with contextlib.suppress(OSError):
            os.unlink(self._path)
        self._listener.close()
        for visitor in self._visitors.values():
            visitor.timer.cancel()
        rests = [visitor.stream.close(linger=True) for visitor in self._visitors.values()]
        self._visitors.clear()
        return [rest for rest in rests if rest is not None]

    def _accept(self) -> None:
        for _ in range(ACCEPTED_AT_ONCE):
            try:
                connection, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                self._refusals.add("full", f"a connection could not be accepted: {error.strerror}")
                self._loop.remove_reader(self._listener.fileno())
                self._loop.call_later(PAUSE_S, self._resume)
                return
            if len(self._visitors) >= self._most:
                self._refusals.add("full", f"a connection beyond the {self._most} that this process takes")
                connection.close()
            else:
                self._take_in(connection)

    def _resume(self) -> None:
        if self._listener.fileno() >= 0:
            self._loop.add_reader(self._listener.fileno(), self._accept)

    def _take_in(self, connection: socket.socket) -> None:
        # A ROUTER of libzmq names its links with a leading zero byte; ours are of another kind.
        name = b"u%d" % next(self._names)
        timer = self._loop.call_later(limits.HANDSHAKE_MS / 1000, self._too_slow_to_greet, name)
        visitor = self._visitors[name] = _Visitor(name, timer)
        visitor.stream = Stream(
            connection,
            self._loop,
            b"ROUTER",
            partial(self._heard, visitor),
            self._drained,
            partial(self._ended, visitor),
            slow=partial(self._refusals.add, "slow", f"a peer left {limits.MAX_QUEUED} parts unread"),
        )

    def _heard(self, visitor: _Visitor, first: memoryview, beside: Sequence[memoryview]) -> None:
        visitor.has_link = True
        self._came(visitor.name, visitor.stream, first, beside)

    def _too_slow_to_greet(self, name: bytes) -> None:
        visitor = self._visitors.get(name)
        if visitor is not None and not visitor.stream.is_ready:
            visitor.stream.give_up("it was too slow during the handshake")

    def _ended(self, visitor: _Visitor, reason: str) -> None:
        if self._visitors.pop(visitor.name, None) is None:
            return
        visitor.timer.cancel()
        if visitor.has_link:
            self._left(visitor.name, reason)
        else:
            self._refusals.add("handshake", f"a connection ended before it said who it is: {reason}")


def _bound(address: str) -> socket.socket:
    """A listening socket. A socket file that a dead process left behind is replaced."""
    where = parse(address)
    check_free(where)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(where.place)
        listener.bind(where.place)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise BadAddress(f"{address} cannot be bound: {error.strerror}") from None
    return listener
