"""Knows which links that peers opened still live. A ROUTER does not tell, so its monitor's descriptors are matched with routing ids.

The monitor reports connections by file descriptor, and the operating system gives a descriptor away again as soon as it is
closed. Two facts of libzmq make the match certain nevertheless: the end of a connection is reported before its descriptor is
closed, and each message names the descriptor it came by. So once the monitor is read up to now, a descriptor that it does not
know to be connected belongs to a link that has ended; and of two links with one descriptor, the one with the lower number has.
"""

import asyncio
import os
import resource
import socket
from collections.abc import Callable

import zmq

from bus.address import IPC, parse
from bus.refusals import Refusals
from bus.zmq_sockets import Context, Socket
from bus.zmq_wire import Arrived, Monitor, Wire

LAST_WORDS = 4096
"""Messages still read after a peer died, before its link is declared lost; far more than its credit allowed it to send."""

MAX_CONNECTIONS = 4096
"""Each costs some 30 KiB before its peer has said a word."""

_FAILURES = {
    zmq.Event.HANDSHAKE_FAILED_NO_DETAIL: "it left or was too slow during the handshake",
    zmq.Event.HANDSHAKE_FAILED_PROTOCOL: "it had no keys, those of another job, or spoke another protocol",
}
_EVENTS = zmq.Event.ACCEPTED | zmq.Event.DISCONNECTED | zmq.Event.HANDSHAKE_FAILED_AUTH | sum(_FAILURES)


class Door:
    """The ROUTER and the connections to it. `left(routing_id)` is called once for each admitted link that ends."""

    def __init__(
        self,
        context: Context,
        router: Socket,
        loop: asyncio.AbstractEventLoop,
        came: Arrived,
        left: Callable[[bytes], None],
        refusals: Refusals,
        drained: Callable[[], None],
    ) -> None:
        self._loop = loop
        self._refusals = refusals
        self._left = left
        self._connected: set[int] = set()
        self._links: dict[int, bytes] = {}
        self._gone: list[bytes] = []
        self._most = most_connections()
        self._bound: set[object] = set()
        self._silent = 0
        """Connections that ended before we heard a word from them and that nobody has counted yet."""
        self._failure = ""
        self._monitor = Monitor(context, router, "door", _EVENTS, loop, self._changed)
        self.wire = Wire(router, loop, came, routed=True, drained=drained)

    def admit(self, routing_id: bytes, first: zmq.Frame) -> None:
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
            self.gone_soon(oldest)
        if descriptor in self._connected:
            self._links[descriptor] = newest
        else:
            self._silent -= 1  # its end was seen before its first word was read
            self.gone_soon(newest)

    def bound(self, address: str) -> None:
        """The ROUTER listens at `address`: connections to it are ours to end."""
        where = parse(address, keyed=True)
        self._bound.add(where.place if where.scheme == IPC else where.port)

    def hang_up(self, routing_id: bytes) -> None:
        """End the connection of a link; its end is reported like any other."""
        for descriptor, known in self._links.items():
            if known == routing_id:
                self._cut(descriptor)
                return

    def gone_soon(self, routing_id: bytes) -> None:
        """The link has ended. Said later: this may run while a message of the same peer is handled, and its others come first."""
        if not self._gone:
            self._loop.call_soon(self._bury)
        self._gone.append(routing_id)

    def close(self, linger_ms: int) -> None:
        """Unbind; replies under way have `linger_ms` to leave."""
        self._monitor.close()
        self.wire.close(linger_ms)

    def _changed(self, event: zmq.Event, descriptor: int) -> None:
        if event == zmq.Event.ACCEPTED:
            self._connected.add(descriptor)
            if len(self._connected) > self._most:
                self._silent -= 1
                self._refusals.add("full", f"a connection beyond the {self._most} that this process takes")
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
                if (name[1] if isinstance(name, tuple) else name) in self._bound:
                    connection.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # it has ended already

    def _ended(self, descriptor: int) -> None:
        self._connected.discard(descriptor)
        routing_id = self._links.pop(descriptor, None)
        if routing_id is not None:
            self.gone_soon(routing_id)
            return
        self._silent += 1
        self._loop.call_soon(self._count_silent)

    def _count_silent(self) -> None:
        """A connection without a link was a stranger's, unless what it said is still to be read."""
        self.wire.drain(LAST_WORDS)
        while self._silent > 0:
            self._silent -= 1
            self._refusals.add(
                "handshake", f"a connection ended before it said who it is: {self._failure or 'no ZMTP'}"
            )
        self._failure = ""

    def _bury(self) -> None:
        self.wire.drain(LAST_WORDS)
        gone, self._gone = self._gone, []
        for routing_id in gone:
            self._left(routing_id)


def most_connections() -> int:
    """Half of the files that this process may have open, so that a flood of connections never keeps it from opening others."""
    return min(MAX_CONNECTIONS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)


def _came_later(one: bytes, other: bytes) -> bool:
    """A ROUTER names its links with a zero byte and a number that it counts up, in the order in which they came, from anywhere."""
    difference = int.from_bytes(one[1:], "big") - int.from_bytes(other[1:], "big")
    return difference % 2**32 < 2**31
