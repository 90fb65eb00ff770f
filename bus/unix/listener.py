"""Listens at an ipc address: takes in the peers that come over a Unix socket, counts strangers, and says whose link has ended."""

import asyncio
import contextlib
import itertools
import os
import socket

from bus import limits
from bus.address import check_free, parse
from bus.connection import Owner, Rest
from bus.errors import BadAddress
from bus.link import Peer
from bus.unix.connection import UnixConnection

ACCEPTED_AT_ONCE = 64

BACKLOG = 1024
"""Connections that the kernel holds between two turns of the loop."""

PAUSE_S = 1.0
"""Nobody is taken in for so long after the process ran out of descriptors."""


class UnixListener:
    """The listening socket and the connections that came by it."""

    def __init__(self, address: str, owner: Owner) -> None:
        """Raises BadAddress when the address cannot be bound."""
        self._path = parse(address).place
        self._owner = owner
        self._loop = owner.loop
        self._connections: dict[Peer, UnixConnection] = {}
        self._timers: dict[Peer, asyncio.TimerHandle] = {}
        self._names = itertools.count(1)
        self._most = limits.most_connections()
        self._listener = _bound(address)
        self._loop.add_reader(self._listener.fileno(), self._accept)

    def beat(self) -> None:
        """To be called at each heartbeat."""
        for connection in list(self._connections.values()):
            connection.beat()

    def close(self) -> list[Rest]:
        """Close everything; what is returned is still to be called, and lets the last words leave."""
        if self._listener.fileno() < 0:
            return []
        self._loop.remove_reader(self._listener.fileno())
        # The file stays behind otherwise. While we still listen on it nobody else can have taken the path.
        with contextlib.suppress(OSError):
            os.unlink(self._path)
        self._listener.close()
        for timer in self._timers.values():
            timer.cancel()
        rests = [connection.close(linger=True) for connection in self._connections.values()]
        self._connections.clear()
        return [rest for rest in rests if rest is not None]

    def _accept(self) -> None:
        for _ in range(ACCEPTED_AT_ONCE):
            try:
                connection, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                self._owner.refusals.add("full", f"a connection could not be accepted: {error.strerror}")
                self._loop.remove_reader(self._listener.fileno())
                self._loop.call_later(PAUSE_S, self._resume)
                return
            if len(self._connections) >= self._most:
                self._owner.refusals.add("full", f"a connection beyond the {self._most} that this process takes")
                connection.close()
            else:
                self._take_in(connection)

    def _resume(self) -> None:
        if self._listener.fileno() >= 0:
            self._loop.add_reader(self._listener.fileno(), self._accept)

    def _take_in(self, connection: socket.socket) -> None:
        # A ROUTER of libzmq names its links with a leading zero byte; ours are of another kind.
        name = b"u%d" % next(self._names)
        self._connections[name] = UnixConnection(connection, name, self._owner, ended=self._ended)
        self._timers[name] = self._loop.call_later(limits.HANDSHAKE_MS / 1000, self._too_slow_to_greet, name)

    def _too_slow_to_greet(self, name: bytes) -> None:
        connection = self._connections.get(name)
        if connection is not None and not connection.is_ready:
            connection.give_up("it was too slow during the handshake")

    def _ended(self, connection: UnixConnection, reason: str) -> None:
        if self._connections.pop(connection.peer, None) is None:
            return
        self._timers.pop(connection.peer).cancel()
        if connection.has_spoken:
            self._owner.ended(connection, reason)
        else:
            self._owner.refusals.add("handshake", f"a connection ended before it said who it is: {reason}")


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
