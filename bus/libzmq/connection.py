"""Our ends of the links that libzmq carries, over tcp: a DEALER of its own for each that we open, the one ROUTER for those that peers do.

A ROUTER does not tell which of its peers still live, so its monitor's descriptors are matched with routing ids. The monitor reports
connections by file descriptor, and the operating system gives a descriptor away again as soon as it is closed. Two facts of libzmq make
the match certain nevertheless: the end of a connection is reported before its descriptor is closed, and each message names the
descriptor it came by. So once the monitor is read up to now, a descriptor that it does not know to be connected belongs to a link that
has ended; and of two links with one descriptor, the one with the lower number has.
"""

import contextlib
import itertools
import os
import socket
import struct
from collections.abc import Callable, Sequence

import zmq
from zmq.utils import z85

from rubato.bus import link as limits
from rubato.bus.errors import BadAddress
from rubato.bus.keys import Keys
from rubato.bus.libzmq.socket import BURST, LAST_WORDS, LoopSocket, Socket, bind_to, connect_to, new_context, new_dealer, new_router
from rubato.bus.link import Rest
from rubato.bus.transport import ABSENT, GONE, LAST_SENDS_S, Transport

LINGER_MS = int(1000 * LAST_SENDS_S)

_OVER = {
    zmq.Event.CLOSED: ABSENT,
    zmq.Event.DISCONNECTED: GONE,
    zmq.Event.HANDSHAKE_FAILED_NO_DETAIL: "the peer does not speak ZMTP",
    zmq.Event.HANDSHAKE_FAILED_PROTOCOL: "the peer does not speak ZMTP",
    zmq.Event.HANDSHAKE_FAILED_AUTH: "the peer refused our keys",
}

_FAILURES = {
    zmq.Event.HANDSHAKE_FAILED_NO_DETAIL: "it left or was too slow during the handshake",
    zmq.Event.HANDSHAKE_FAILED_PROTOCOL: "it had no keys, those of another job, or spoke another protocol",
}
_EVENTS = zmq.Event.ACCEPTED | zmq.Event.DISCONNECTED | zmq.Event.HANDSHAKE_FAILED_AUTH | sum(_FAILURES)

ZAP_ENDPOINT = "inproc://zeromq.zap.01"
ZAP_VERSION = b"1.0"


class ZmqContext:
    """A libzmq context and all its sockets, on one event loop."""

    def __init__(self, keys: Keys | None, owner: Transport) -> None:
        self.keys = keys
        self.owner = owner
        self.context = new_context()
        self.monitors = itertools.count(1)
        """Numbers of theirs, so that no two have one name."""
        self._listener: ZmqListener | None = None

    def bind(self, address: str) -> str:
        """Listen there; the address with its port. Raises BadAddress."""
        if self._listener is None:
            self._listener = ZmqListener(self)
        return self._listener.bind(address)

    def dial(self, address: str) -> "Dialled":
        """A connection to `address`. Raises BadAddress."""
        try:
            return Dialled(self, address)
        except zmq.ZMQError as error:
            raise BadAddress(f"{address} cannot be connected to: {error.strerror}") from None

    def close(self) -> Rest:
        """Close what is bound; the caller closes what it dialled. What is returned waits for the last sends."""
        if self._listener is not None:
            self._listener.close()
        return self.context.term  # the context, unlike its sockets, may be used from any thread


class SocketMonitor:
    """Reports what happens to the connections of `watched`, from before its first `connect` or `bind`: (event, value)."""

    def __init__(self, zmq_context: ZmqContext, watched: Socket, events: int, happened: Callable[[zmq.Event, int], None]) -> None:
        self._watched = watched
        self._happened = happened
        # pyzmq's own helper names the endpoint after the descriptor, which is used again while the old endpoint still lives.
        endpoint = f"inproc://monitor-{next(zmq_context.monitors)}"
        watched.monitor(endpoint, events)
        ear = zmq_context.context.socket(zmq.PAIR)
        ear.linger = 0
        ear.connect(endpoint)
        self._ear = LoopSocket(ear, zmq_context.owner, self._arrived)

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


class Dialled:
    """A DEALER connected to `address`. It reports each sign that the link is over to its owner."""

    def __init__(self, zmq_context: ZmqContext, address: str) -> None:
        """Raises BadAddress, and zmq.ZMQError when there are no more sockets."""
        self.peer = address
        self._owner = owner = zmq_context.owner
        dealer = new_dealer(zmq_context.context)
        with contextlib.ExitStack() as undo:
            undo.callback(dealer.close, 0)
            self._monitor = SocketMonitor(zmq_context, dealer, sum(_OVER), lambda event, _: self._changed(event))
            undo.callback(self._monitor.close)
            connect_to(dealer, address, zmq_context.keys)
            undo.pop_all()
        self._socket = LoopSocket(dealer, owner, lambda _, first, beside: owner.heard(self, first.buffer, beside))

    def send(self, data: bytes | bytearray, buffers: Sequence[memoryview | bytes]) -> None:
        """See Connection."""
        try:
            self._socket.send(b"", data, buffers)
        except zmq.ZMQError:
            # Said later: this may run inside `post`.
            self._owner.loop.call_soon(self._changed, zmq.Event.DISCONNECTED)

    def close(self, *, linger: bool = False) -> None:
        """See Connection. What lingers leaves before the context is terminated."""
        self._monitor.close()
        self._socket.close(LINGER_MS if linger else 0)

    def _changed(self, event: zmq.Event) -> None:
        """The monitor: all it reports is an end. What the peer said before comes first."""
        self._socket.drain(LAST_WORDS)
        self._owner.ended(self, _OVER[event])


class TakenIn:
    """A peer that came to our ROUTER."""

    __slots__ = ("_listener", "_router", "peer")

    def __init__(self, listener: "ZmqListener", router: LoopSocket, routing_id: bytes) -> None:
        self.peer = routing_id
        self._listener = listener
        self._router = router

    def send(self, data: bytes | bytearray, buffers: Sequence[memoryview | bytes]) -> None:
        """See Connection."""
        try:
            self._router.send(self.peer, data, buffers)
        except zmq.ZMQError as error:
            self._listener.unsent(self.peer, error.errno)

    def close(self, *, linger: bool = False) -> None:
        """The ROUTER stays: it is the listener's."""


class ZmqListener:
    """The ROUTER and the connections to it. Its owner is told once of each admitted link that ends."""

    def __init__(self, zmq_context: ZmqContext) -> None:
        self._keys = zmq_context.keys
        self._owner = zmq_context.owner
        self._loop = self._owner.loop
        self._zap = None if self._keys is None else Zap(zmq_context, self._keys.client.public)
        self._taken_in: dict[bytes, TakenIn] = {}
        self._connected: set[int] = set()
        self._links: dict[int, bytes] = {}
        self._gone: list[bytes] = []
        self._most = limits.most_connections()
        self._ports: set[int] = set()
        self._silent = 0
        """Connections that ended before we heard a word from them, and that are not counted yet."""
        self._failure = ""
        self._router = new_router(zmq_context.context)
        # It listens before the first peer can come.
        self._monitor = SocketMonitor(zmq_context, self._router, _EVENTS, self._changed)
        self._socket = LoopSocket(self._router, self._owner, self._arrived, routed=True)

    def bind(self, where: str) -> str:
        """The address with its port. Raises BadAddress."""
        address = bind_to(self._router, where, self._keys)
        self._ports.add(address.port)
        return f"tcp://{address.place}:{address.port}"

    def _arrived(self, routing_id: bytes, first: zmq.Frame, beside: list[memoryview]) -> None:
        connection = self._taken_in.get(routing_id)
        if connection is None:
            connection = TakenIn(self, self._socket, routing_id)
            self._taken_in[routing_id] = connection
            self._admit(routing_id, first)
        self._owner.heard(connection, first.buffer, beside)

    def _admit(self, routing_id: bytes, first: zmq.Frame) -> None:
        """Watch the link that `first`, its first message, came by."""
        self._monitor.drain()
        try:
            descriptor = int(first.get(zmq.SRCFD))
        except zmq.ZMQError:
            # This platform does not tell. The loss shows when a reply cannot be sent.
            return
        newest, other = routing_id, self._links.pop(descriptor, None)
        if other is not None:
            # Two links by one descriptor: the older one has ended. Its messages may be read after those of the newer one.
            newest, oldest = (routing_id, other) if _came_later(routing_id, other) else (other, routing_id)
            self._gone_soon(oldest)
        if descriptor in self._connected:
            self._links[descriptor] = newest
        else:
            self._silent -= 1  # its end was seen before its first word was read
            self._gone_soon(newest)

    def unsent(self, routing_id: bytes, number: int | None) -> None:
        """What the peer should get was not taken. One that is gone may have said something before that still waits to be read; of one
        that does not read what we answer the connection ends, and frees what is queued for it. Either end is reported like any other."""
        if number != zmq.EAGAIN:
            self._gone_soon(routing_id)
            return
        self._owner.refusals.add("slow", f"a peer left {limits.MAX_QUEUED} frames unread")
        for descriptor, known in self._links.items():
            if known == routing_id:
                self._cut(descriptor)
                return

    def _gone_soon(self, routing_id: bytes) -> None:
        """The link has ended. Said later: this may run while a message of the same peer is handled, and its others come first."""
        if not self._gone:
            self._loop.call_soon(self._bury)
        self._gone.append(routing_id)

    def close(self) -> None:
        """Unbind; replies under way leave before the context is terminated."""
        self._monitor.close()
        self._socket.close(LINGER_MS)
        if self._zap is not None:
            self._zap.close()

    def _changed(self, event: zmq.Event, descriptor: int) -> None:
        if event == zmq.Event.ACCEPTED:
            self._connected.add(descriptor)
            if len(self._connected) > self._most:
                self._silent -= 1
                self._owner.refusals.add("full", f"a connection beyond the {self._most} that this process takes")
                self._cut(descriptor)
        elif event == zmq.Event.DISCONNECTED:
            self._ended(descriptor)
        elif event == zmq.Event.HANDSHAKE_FAILED_AUTH:
            self._silent -= 1  # counted by the ZAP handler, which knows its key
        else:  # DISCONNECTED follows
            self._failure = _FAILURES[event]

    def _cut(self, descriptor: int) -> None:
        """Shut a connection of ours down; libzmq sees its end. By now the descriptor may be another file's, so it is looked at first."""
        try:
            with socket.socket(fileno=os.dup(descriptor)) as connection:
                name = connection.getsockname()
                if isinstance(name, tuple) and name[1] in self._ports:
                    connection.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # it has ended already

    def _ended(self, descriptor: int) -> None:
        self._connected.discard(descriptor)
        routing_id = self._links.pop(descriptor, None)
        if routing_id is not None:
            self._gone_soon(routing_id)
            return
        self._silent += 1
        self._loop.call_soon(self._count_silent)

    def _count_silent(self) -> None:
        """A connection without a link was a stranger's, unless what it said is still to be read."""
        self._socket.drain(LAST_WORDS)
        while self._silent > 0:
            self._silent -= 1
            self._owner.refusals.add("handshake", f"a connection ended before it said who it is: {self._failure or 'no ZMTP'}")
        self._failure = ""

    def _bury(self) -> None:
        self._socket.drain(LAST_WORDS)
        gone, self._gone = self._gone, []
        for routing_id in gone:
            if (connection := self._taken_in.pop(routing_id, None)) is not None:
                self._owner.ended(connection, GONE)


def _came_later(one: bytes, other: bytes) -> bool:
    """A ROUTER names its links with a zero byte and a number that it counts up, in the order in which they came, from anywhere."""
    difference = int.from_bytes(one[1:], "big") - int.from_bytes(other[1:], "big")
    return difference % 2**32 < 2**31


class Zap:
    """The context's one ZAP handler (RFC 27): libzmq asks it, inside the process, for each key that presents itself.

    A request that makes no sense is a stranger's too.
    """

    def __init__(self, zmq_context: ZmqContext, admitted: str) -> None:
        self._admitted = admitted
        self._owner = zmq_context.owner
        self._socket = zmq_context.context.socket(zmq.ROUTER)
        self._socket.linger = 0
        self._socket.bind(ZAP_ENDPOINT)
        self._ear = LoopSocket(self._socket, self._owner, self._asked, routed=True)

    def close(self) -> None:
        self._ear.close()

    def _asked(self, sender: bytes, _delimiter: zmq.Frame, asked: list[memoryview]) -> None:
        """Frames: version, request id, domain, the peer's address, its routing id, mechanism, and for CURVE its public key."""
        parts = [bytes(part) for part in asked]
        known = len(parts) == 7 and parts[0] == ZAP_VERSION and parts[5] == b"CURVE"
        key = z85.encode(parts[6]).decode() if known and len(parts[6]) == 32 else ""
        admitted = key == self._admitted
        if not admitted:
            whence = parts[3].decode(errors="replace") if len(parts) > 3 else "an unknown address"
            self._owner.refusals.add("key", f"{whence} presented the unknown key {key or '(none)'}")
        status, text = (b"200", b"OK") if admitted else (b"400", b"this key is not admitted")
        request = parts[1] if len(parts) > 1 else b""
        answer = [sender, b"", ZAP_VERSION, request, status, text, key.encode(), b""]
        self._socket.send_multipart(answer, zmq.NOBLOCK)
