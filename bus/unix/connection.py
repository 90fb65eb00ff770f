"""One connection over a Unix socket, speaking ZMTP on the event loop itself.

Within a host this takes the place of libzmq's sockets, and ZeroMQ peers do not notice. libzmq moves each message through an I/O thread
on either side: four hand-overs between threads for a round trip, each a wake-up, where a socket on the loop has two.
"""

import contextlib
import errno
import itertools
import socket
from collections import deque
from collections.abc import Callable, Sequence

from bus import limits
from bus.chunks import cut
from bus.connection import GONE, LAST_SENDS_S, Owner, Rest
from bus.errors import BadFrame
from bus.link import Peer
from bus.unix.zmtp import GREETING, PING, Reader, header, ready

READ_BYTES = 64 * 1024
"""Read at a time, so that no peer holds the loop up; more within a large part, which is only put aside."""

LARGE_READ_BYTES = 1024 * 1024

COPIED_BYTES = 64 * 1024
"""Up to here a part is copied behind its header; a larger one is lent to the kernel beside it."""

VECTORS = 64
"""Pieces handed to the kernel in one call."""

SILENT_BEATS = 5
"""A peer that has said nothing for so many heartbeats, answers to ours included, is given up."""


class UnixConnection:
    """Owns `connection`; see Connection. One that was taken in is given up once its peer leaves `MAX_QUEUED` parts unread."""

    def __init__(
        self, connection: socket.socket, peer: Peer, owner: Owner, *, ended: "Callable[[UnixConnection, str], None]"
    ) -> None:
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

    def flushed(self) -> None:
        """Nothing is left to do: what was sent went to the kernel, or waits for it."""

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


def dial(path: str, peer: str, owner: Owner) -> UnixConnection:
    """A connection to whoever listens at `path`, made at once. Raises OSError."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        connection.connect(path)
    except OSError:
        connection.close()
        raise
    return UnixConnection(connection, peer, owner, ended=owner.ended)
