"""One ZeroMQ socket on an asyncio loop: the rules of its edge-triggered descriptor are kept here and nowhere else.

pyzmq's own asyncio sockets cost 9 µs for a message that is ready and 25 µs for one that is not; the socket itself costs 0.2 µs. So the
socket is read directly, under three rules:

1. The descriptor from `FD` does not mean "a message is here" but "ask for `EVENTS`", and it fires once per change. Whoever is
   woken must read until nothing is left, or promise to come back; else the wake-up is lost and the link hangs.
2. Any call on the socket, a send too, may swallow that wake-up. So `EVENTS` is asked again after every flush.
3. A reader that drains without bound starves everything else on the loop. After `BURST` messages it yields and comes back.
"""

import asyncio
import contextlib
import struct
from collections.abc import Callable, Sequence
from typing import cast

import zmq

# The C methods themselves: the wrapper around `send` costs more than twice what `send` does.
from zmq.backend import Socket as RawSocket

from bus.chunks import MAX_PARTS, cut
from bus.libzmq.options import Context, Socket

BURST = 64
"""Messages read before the loop runs something else; each may hold 512 envelopes."""

LAST_WORDS = 4096
"""Messages still read after a peer died, before its link is declared lost; far more than its credit allowed it to send."""

ZERO_COPY_BYTES = 64 * 1024
"""From here on lending the memory to libzmq, and being told when it is free again, is cheaper than a copy."""

Arrived = Callable[[bytes, zmq.Frame, list[memoryview]], None]
"""Called with the sender's identity (empty but on a ROUTER), the first part, and the parts beside it."""

_NOBLOCK = int(zmq.NOBLOCK)
_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)
_POLLIN = int(zmq.POLLIN)
_EVENTS = int(zmq.EVENTS)
_send = RawSocket.send
_recv = RawSocket.recv
_get = RawSocket.get


class LoopSocket:
    """Owns `socket`: reads it whenever there is something, and closes it."""

    def __init__(
        self,
        socket: Socket,
        loop: asyncio.AbstractEventLoop,
        arrived: Arrived,
        *,
        routed: bool = False,
        drained: Callable[[], None] | None = None,
    ) -> None:
        """`drained` is called after messages were handed to `arrived` because the socket had become readable."""
        self._socket = socket
        self._loop = loop
        self._arrived = arrived
        self._drained = drained
        self._routed = routed
        self._is_closed = False
        self._comes_back = False
        self._is_touched = False
        self._fd = socket.FD
        loop.add_reader(self._fd, self._readable)
        # What arrived before the reader was added has already fired.
        self._come_back()

    def send(self, peer: bytes, data: bytes | bytearray, buffers: Sequence[memoryview | bytes]) -> None:
        """Queue one message. Raises zmq.ZMQError when the link is gone; never because it is slow, as high-water marks are 0."""
        self._is_touched = True
        if self._routed:
            _send(self._socket, peer, _MORE)
        if not buffers:
            if len(data) < ZERO_COPY_BYTES:
                _send(self._socket, data, _NOBLOCK)
            else:
                _send(self._socket, data, _NOBLOCK, False)
            return
        _send(self._socket, data, _MORE)
        # pyzmq itself copies the parts that are too small to lend.
        parts = list(cut(buffers))
        for part in parts[:-1]:
            _send(self._socket, part, _MORE, False)
        _send(self._socket, parts[-1], _NOBLOCK, False)

    def flushed(self) -> None:
        """To be called after the last send of a tick, once or for each peer: rule 2."""
        if self._is_touched:
            self._is_touched = False
            if not self._comes_back and not self._is_closed and self._has_more():
                self._come_back()

    def drain(self, most: int) -> bool:
        """Read up to `most` messages; whether none is left. If some are, or `arrived` raised, reading goes on next tick.

        Not for use inside `arrived`: messages would overtake each other.
        """
        emptied = False
        try:
            # Asking EVENTS costs 0.9 µs, a read that finds nothing 2.4 µs. One message is the usual case, so ask after the first.
            for count in range(most):
                if self._is_closed or (count == 1 and not self._has_more()) or not self._read():
                    emptied = True
                    break
        finally:
            if not emptied:
                self._come_back()
        return emptied

    def close(self, linger_ms: int = 0) -> None:
        """Stop reading at once; what is queued has `linger_ms` to leave in the background."""
        if not self._is_closed:
            self._is_closed = True
            self._loop.remove_reader(self._fd)
            self._socket.close(linger_ms)

    def _readable(self) -> None:
        self._comes_back = False
        self.drain(BURST)
        if self._drained is not None:
            self._drained()

    def _come_back(self) -> None:
        if not self._comes_back and not self._is_closed:
            self._comes_back = True
            self._loop.call_soon(self._readable)

    def _has_more(self) -> bool:
        return bool(cast("int", _get(self._socket, _EVENTS)) & _POLLIN)

    def _read(self) -> bool:
        """Read one message and hand it over; False when there is none. Its parts arrive all together or not at all."""
        sender = b""
        try:
            if self._routed:
                sender = _recv(self._socket, _NOBLOCK)
            # As a Frame: it tells whether more follows, which would cost another call, and large parts are not copied.
            first = _recv(self._socket, _NOBLOCK, False)
        except zmq.ZMQError:
            # Nothing there (EAGAIN), or never again (the context was terminated).
            return False
        beside: list[memoryview] = []
        more = first.more
        while more:
            part = _recv(self._socket, _NOBLOCK, False)
            more = part.more
            # One too many is kept, so that the reader of the table sees that it does not match.
            if len(beside) <= MAX_PARTS:
                beside.append(part.buffer)
        self._arrived(sender, first, beside)
        return True


class SocketMonitor:
    """Reports what happens to the connections of `watched`, from before its first `connect` or `bind`: (event, value)."""

    def __init__(
        self,
        context: Context,
        watched: Socket,
        name: str,
        events: int,
        loop: asyncio.AbstractEventLoop,
        happened: Callable[[zmq.Event, int], None],
    ) -> None:
        self._watched = watched
        self._happened = happened
        # pyzmq's own helper names the endpoint after the descriptor, which is used again while the old endpoint still lives.
        endpoint = f"inproc://monitor-{name}"
        watched.monitor(endpoint, events)
        ear = context.socket(zmq.PAIR)
        ear.linger = 0
        ear.connect(endpoint)
        self._ear = LoopSocket(ear, loop, self._arrived)

    def drain(self) -> None:
        """Report everything that has happened up to now."""
        while not self._ear.drain(BURST):
            pass

    def close(self) -> None:
        """Stop reporting. Call it before the watched socket is closed."""
        with contextlib.suppress(zmq.ZMQError):
            self._watched.monitor(None, 0)
        self._ear.close()

    def _arrived(self, _sender: bytes, first: zmq.Frame, _beside: list[memoryview]) -> None:
        event, value = struct.unpack("=HI", first.buffer)
        self._happened(zmq.Event(event), value)
