"""ZeroMQ sockets on an asyncio loop: their options, and the rules of their edge-triggered descriptor, are kept here and nowhere else.

Every option is set before a socket binds or connects: later, libzmq ignores most of them in silence.

pyzmq's own asyncio sockets cost 9 µs for a message that is ready and 25 µs for one that is not; the socket itself costs 0.2 µs. So the
socket is read directly, under three rules:

1. The descriptor from `FD` does not mean "a message is here" but "ask for `EVENTS`", and it fires once per change. The reader
   that it wakes must read until nothing is left, or promise to come back; else the wake-up is lost and the link hangs.
2. Any call on the socket, a send too, may swallow that wake-up. So `EVENTS` is asked again after every flush.
3. A reader that drains without bound starves everything else on the loop. After `BURST` messages it yields and comes back.
"""

from collections.abc import Callable, Sequence
from typing import cast

import zmq

# The C methods themselves: the wrapper around `send` costs more than twice what `send` does.
from zmq.backend import Socket as RawSocket

from rubato.bus import link as limits
from rubato.bus.address import Address, parse
from rubato.bus.codec import MAX_FRAME_BYTES, MAX_PARTS, cut
from rubato.bus.errors import BadAddress
from rubato.bus.keys import Keys
from rubato.bus.transport import Transport

BURST = 64
"""Messages read before the loop runs something else; each may hold 512 envelopes."""

LAST_WORDS = 4096
"""Messages still read after a peer died, before its link is declared lost; far more than its credit allowed it to send."""

ZERO_COPY_BYTES = 64 * 1024
"""From here on lending the memory to libzmq, and being told when it is free again, is cheaper than a copy."""

NEVER_MS = 24 * 3600 * 1000
"""When a DEALER would reconnect; its transport drops it long before, so that what is queued for a dead peer never reaches the next
process at its address. Not -1, libzmq's own "never": that ends the pipe at once, and replies that arrived but were not read are lost."""

MAX_SOCKETS = 16 * 1024
"""Three per peer: the DEALER and both ends of its monitor. libzmq's default would end at 340 peers."""

Context = zmq.Context[zmq.Socket[bytes]]
Socket = zmq.Socket[bytes]

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

    def __init__(self, socket: Socket, owner: Transport, arrived: Arrived, *, routed: bool = False) -> None:
        self._socket = socket
        self._owner = owner
        self._loop = owner.loop
        self._arrived = arrived
        self._routed = routed
        self._is_closed = False
        self._comes_back = False
        self._is_touched = False
        self._fd = socket.FD
        self._loop.add_reader(self._fd, self._readable)
        # What arrived before the reader was added has already fired.
        self._come_back()

    def send(self, peer: bytes, data: bytes | bytearray, buffers: Sequence[memoryview | bytes]) -> None:
        """Queue one message. Raises zmq.ZMQError when the link is gone; never because it is slow, as high-water marks are 0."""
        if not self._is_touched:
            self._is_touched = True
            self._owner.after_sends.append(self._flushed)
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
        self._owner.drained()

    def _flushed(self) -> None:
        """Rule 2."""
        self._is_touched = False
        if not self._comes_back and not self._is_closed and self._has_more():
            self._come_back()

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


# -- options ----------------------------------------------------------------------------------------------------------


def new_context() -> Context:
    """One I/O thread: it moves 4 GB/s, more than the event loop behind it can look at."""
    context: Context = zmq.Context(io_threads=1)
    context.set(zmq.MAX_SOCKETS, MAX_SOCKETS)
    return context


def new_router(context: Context) -> Socket:
    """The socket that peers come to; `bind_to` binds it."""
    socket = _socket(context, zmq.ROUTER)
    # Without it, what is sent to a peer that has gone, or reads nothing, vanishes in silence.
    socket.set(zmq.ROUTER_MANDATORY, 1)
    socket.set(zmq.SNDHWM, limits.MAX_QUEUED)
    socket.set(zmq.RCVHWM, limits.MAX_QUEUED)
    return socket


def bind_to(socket: Socket, where: str, keys: Keys | None) -> Address:
    """Bind; the address with its port: the first free one of a range, or what the system chose. Raises BadAddress when it is taken.

    libzmq copies a socket's options into each endpoint as it is bound, so one socket may be bound in the clear first and with keys
    afterwards, but not the other way round.
    """
    address = _prepared(socket, where)
    if keys is not None:
        socket.set(zmq.CURVE_SERVER, 1)
        socket.set(zmq.CURVE_SECRETKEY, keys.server.secret.encode())
        # Without a domain libzmq would admit every key.
        socket.set(zmq.ZAP_DOMAIN, b"rubato")
    for port in range(address.port, max(address.port, address.last_port) + 1):
        try:
            socket.bind(_spelt(address._replace(port=port)))
            break
        except zmq.ZMQError as error:
            if not address.last_port or error.errno != zmq.EADDRINUSE:
                raise BadAddress(f"{where} cannot be bound: {error.strerror}") from None
    else:
        raise BadAddress(f"{where} cannot be bound: all of its ports are in use; widen the range")
    return parse(cast("bytes", socket.get(zmq.LAST_ENDPOINT)).rstrip(b"\0").decode(), keyed=True)


def new_dealer(context: Context) -> Socket:
    """The socket that goes to one peer; `connect_to` connects it."""
    socket = _socket(context, zmq.DEALER)
    socket.set(zmq.RECONNECT_IVL, NEVER_MS)
    socket.set(zmq.CONNECT_TIMEOUT, limits.HANDSHAKE_MS)
    return socket


def connect_to(socket: Socket, where: str, keys: Keys | None) -> None:
    """Connect in the background. Raises BadAddress when `where` is not an address that may be reached."""
    address = _prepared(socket, where)
    if keys is not None:
        socket.set(zmq.CURVE_SERVERKEY, keys.server.public.encode())
        socket.set(zmq.CURVE_PUBLICKEY, keys.client.public.encode())
        socket.set(zmq.CURVE_SECRETKEY, keys.client.secret.encode())
    try:
        socket.connect(_spelt(address))
    except zmq.ZMQError as error:
        raise BadAddress(f"{where} cannot be connected to: {error.strerror}") from None


def _socket(context: Context, kind: int) -> Socket:
    socket = context.socket(kind)
    socket.set(zmq.LINGER, 0)
    socket.set(zmq.SNDHWM, 0)
    socket.set(zmq.RCVHWM, 0)
    # Checked by libzmq against the announced size of each part, before it allocates for it.
    socket.set(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
    socket.set(zmq.HANDSHAKE_IVL, limits.HANDSHAKE_MS)
    socket.set(zmq.HEARTBEAT_IVL, limits.HEARTBEAT_MS)
    socket.set(zmq.HEARTBEAT_TIMEOUT, limits.DEAD_MS)
    socket.set(zmq.HEARTBEAT_TTL, limits.DEAD_MS)
    return socket


def _prepared(socket: Socket, where: str) -> Address:
    address = parse(where, keyed=True)
    if address.place.startswith("["):
        socket.set(zmq.IPV6, 1)
    return address


def _spelt(address: Address) -> str:
    # A name may stand for several addresses, and libzmq binds to addresses only.
    host = "127.0.0.1" if address.place == "localhost" else address.place
    return f"tcp://{host}:{address.port or '*'}"
