"""Connections over Unix sockets, speaking ZMTP on the event loop itself, and the listener that takes in those of peers.

Within a host this takes the place of libzmq's sockets, and ZeroMQ peers do not notice. libzmq moves each message through an I/O thread
on either side: four hand-overs between threads for a round trip, each a wake-up, where a socket on the loop has two.
"""

import asyncio
import contextlib
import errno
import itertools
import os
import socket
from collections import deque
from collections.abc import Callable, Sequence

from rubato.bus import link as limits
from rubato.bus.address import check_free
from rubato.bus.codec import cut
from rubato.bus.errors import BadAddress, BadFrame
from rubato.bus.link import Peer, Rest
from rubato.bus.transport import GONE, LAST_SENDS_S, Transport
from rubato.bus.unix.zmtp import GREETING, PING, Reader, header, ready

READ_BYTES = 64 * 1024
"""Read at a time, so that no peer holds the loop up; more within a large part, which is only put aside."""

LARGE_READ_BYTES = 1024 * 1024

COPIED_BYTES = 64 * 1024
"""Up to here a part is copied behind its header; a larger one is lent to the kernel beside it."""

VECTORS = 64
"""Pieces handed to the kernel in one call."""

SILENT_BEATS = 5
"""A peer that has said nothing for so many heartbeats, answers to ours included, is given up."""


ACCEPTED_AT_ONCE = 64

BACKLOG = 1024
"""Connections that the kernel holds between two turns of the loop."""

PAUSE_S = 1.0
"""No connection is taken in for so long after the process ran out of descriptors."""


class UnixConnection:
    """Owns `connection`; see Connection. One that was taken in is given up once its peer leaves `MAX_QUEUED` parts unread."""

    def __init__(self, connection: socket.socket, peer: Peer, owner: Transport, *, ended: "Callable[[UnixConnection, str], None]") -> None:
        """`ended` is called once, later than whatever found out, unless we close it ourselves."""
        connection.setblocking(False)
        self.peer: Peer = peer
        self.has_spoken = False
        """A message has arrived."""
        self._connection = connection
        self._fd = connection.fileno()
        self._owner = owner
        self._loop = owner.loop
        self._ended = ended
        self._is_taken_in = isinstance(peer, bytes)
        self._reader = Reader(self._heard, self._write)
        self._unsent: deque[memoryview] = deque()
        self._is_closed = False
        self._silent_beats = 0
        self._loop.add_reader(self._fd, self._readable)
        self._write(GREETING + ready(b"ROUTER" if self._is_taken_in else b"DEALER"))

    @property
    def is_ready(self) -> bool:
        """The ZMTP handshake is over."""
        return self._reader.is_ready

    def send(self, data: bytes | bytearray, buffers: Sequence[memoryview | bytes] = ()) -> None:
        """Send one message, at once where the kernel takes it. A peer that has gone is reported by `ended` alone."""
        if not buffers and not self._unsent and len(data) < COPIED_BYTES:
            self._write(header(len(data)) + data)
            return
        if self._is_taken_in and len(self._unsent) > limits.MAX_QUEUED:
            self._owner.refusals.add("slow", f"a peer left {limits.MAX_QUEUED} parts unread")
            self._unsent.clear()
            self.give_up("the peer reads nothing")
            return
        parts = [data, *cut(buffers)] if buffers else [data]
        for index, part in enumerate(parts):
            begin = header(len(part), more=index + 1 < len(parts))
            if len(part) < COPIED_BYTES:
                self._unsent.append(memoryview(begin + part))
            else:
                self._unsent.append(memoryview(begin))
                self._unsent.append(memoryview(part))
        self._push()

    def beat(self) -> None:
        """To be called at each heartbeat: sends one, and gives up a peer that answers none."""
        self._silent_beats += 1
        if self._silent_beats > SILENT_BEATS:
            self.give_up(f"the peer said nothing for {SILENT_BEATS} heartbeats")
        elif self._reader.is_ready and not self._unsent:
            self._write(PING)

    def close(self, *, linger: bool = False) -> Rest | None:
        """See Connection."""
        if self._is_closed:
            return None
        self._detach()
        if linger and self._unsent:
            return self._send_rest
        self._connection.close()
        return None

    def give_up(self, reason: str) -> None:
        """End the connection as if the peer had."""
        if not self._is_closed:
            self._detach()
            self._connection.close()
            self._loop.call_soon(self._ended, self, reason)

    def _send_rest(self) -> None:
        self._connection.settimeout(LAST_SENDS_S)
        with contextlib.suppress(OSError):  # gone, or too slow: it hears of the end either way
            for piece in self._unsent:
                self._connection.sendall(piece)
        self._connection.close()

    def _write(self, piece: bytes) -> None:
        if not self._unsent:
            try:
                sent = self._connection.send(piece)
            except BlockingIOError:
                sent = 0
            except OSError:
                return  # the reader finds out, after the peer's last words
            if sent == len(piece):
                return
            self._unsent.append(memoryview(piece)[sent:])
            self._loop.add_writer(self._fd, self._push)
        else:
            self._unsent.append(memoryview(piece))  # its turn comes

    def _push(self) -> None:
        """Send as much as the kernel takes, and come back when it takes more."""
        unsent = self._unsent
        try:
            while unsent:
                sent = self._connection.sendmsg(list(itertools.islice(unsent, VECTORS)))
                while unsent and sent >= len(unsent[0]):
                    sent -= len(unsent.popleft())
                if sent:
                    unsent[0] = unsent[0][sent:]
        except BlockingIOError:
            self._loop.add_writer(self._fd, self._push)
            return
        except OSError:
            unsent.clear()
        if not self._is_closed:
            self._loop.remove_writer(self._fd)

    def _heard(self, first: memoryview, beside: Sequence[memoryview]) -> None:
        self.has_spoken = True
        self._owner.heard(self, first, beside)

    def _readable(self) -> None:
        missing = self._reader.missing
        try:
            data = self._connection.recv(min(missing + READ_BYTES, LARGE_READ_BYTES) if missing else READ_BYTES)
        except BlockingIOError:
            return
        except OSError as error:
            self.give_up(GONE if error.errno in (errno.ECONNRESET, errno.EPIPE) else str(error.strerror))
            return
        if not data:
            self.give_up(GONE)
            return
        self._silent_beats = 0
        try:
            self._reader.feed(data)
        except BadFrame as error:
            self.give_up(str(error))
        else:
            self._owner.drained()

    def _detach(self) -> None:
        self._is_closed = True
        self._loop.remove_reader(self._fd)
        self._loop.remove_writer(self._fd)


def dial(path: str, peer: str, owner: Transport) -> UnixConnection:
    """A connection to the process that listens at `path`, made at once. Raises OSError."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        connection.connect(path)
    except OSError:
        connection.close()
        raise
    return UnixConnection(connection, peer, owner, ended=owner.ended)


class UnixListener:
    """The listening socket and the connections that came by it."""

    def __init__(self, path: str, owner: Transport) -> None:
        """Raises BadAddress when the path cannot be bound."""
        self._path = path
        self._owner = owner
        self._loop = owner.loop
        self._connections: dict[Peer, UnixConnection] = {}
        self._timers: dict[Peer, asyncio.TimerHandle] = {}
        self._names = itertools.count(1)
        self._most = limits.most_connections()
        self._listener = _bound(path)
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
        # The file stays behind otherwise. While we still listen on it no other process can have taken the path.
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


def _bound(path: str) -> socket.socket:
    """A listening socket. A socket file that a dead process left behind is replaced."""
    check_free(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        listener.bind(path)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise BadAddress(f"ipc://{path} cannot be bound: {error.strerror}") from None
    return listener
