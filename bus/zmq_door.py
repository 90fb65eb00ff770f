"""Knows which links that peers opened still live. A ROUTER does not tell, so its monitor's descriptors are matched with routing ids.

The monitor reports connections by file descriptor, and the operating system gives a descriptor away again as soon as it is
closed. Two facts of libzmq make the match certain nevertheless: the end of a connection is reported before its descriptor is
closed, and each message names the descriptor it came by. So once the monitor is read up to now, a descriptor that it does not
know to be connected belongs to a link that has ended; and of two links with one descriptor, the one with the lower number has.
"""

import asyncio
import os
import socket
from collections.abc import Callable

import zmq

from bus import limits
from bus.address import parse
from bus.end import GONE, Came, Left
from bus.keys import Keys
from bus.refusals import Refusals
from bus.zmq_ends import LINGER_MS, Caller
from bus.zmq_sockets import Context, bind_to, new_router
from bus.zmq_wire import LAST_WORDS, SocketMonitor, Wire

_FAILURES = {
    zmq.Event.HANDSHAKE_FAILED_NO_DETAIL: "it left or was too slow during the handshake",
    zmq.Event.HANDSHAKE_FAILED_PROTOCOL: "it had no keys, those of another job, or spoke another protocol",
}
_EVENTS = zmq.Event.ACCEPTED | zmq.Event.DISCONNECTED | zmq.Event.HANDSHAKE_FAILED_AUTH | sum(_FAILURES)


class Door:
    """The ROUTER and the connections to it. `left` is called once for each admitted link that ends."""

    def __init__(
        self,
        context: Context,
        loop: asyncio.AbstractEventLoop,
        came: Came,
        left: Left,
        refusals: Refusals,
        drained: Callable[[], None],
    ) -> None:
        self._loop = loop
        self._refusals = refusals
        self._came, self._left = came, left
        self._callers: dict[bytes, Caller] = {}
        self._connected: set[int] = set()
        self._links: dict[int, bytes] = {}
        self._gone: list[bytes] = []
        self._most = limits.most_connections()
        self._ports: set[int] = set()
        self._silent = 0
        """Connections that ended before we heard a word from them and that nobody has counted yet."""
        self._failure = ""
        self._router = new_router(context)
        # It listens before the first peer can come.
        self._monitor = SocketMonitor(context, self._router, "door", _EVENTS, loop, self._changed)
        self._wire = Wire(self._router, loop, self._arrived, routed=True, drained=drained)

    def bind(self, where: str, keys: Keys | None) -> str:
        """The address with its port. Raises BadAddress."""
        address = bind_to(self._router, where, keys)
        self._ports.add(parse(address, keyed=True).port)
        return address

    def _arrived(self, routing_id: bytes, first: zmq.Frame, beside: list[memoryview]) -> None:
        caller = self._callers.get(routing_id)
        if caller is None:
            caller = self._callers[routing_id] = Caller(self._wire, routing_id, self._gone_soon, self._hang_up)
            self._admit(routing_id, first)
        self._came(routing_id, caller, first.buffer, beside)

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

    def _hang_up(self, routing_id: bytes) -> None:
        """The peer does not read what we answer: its connection ends, and frees what is queued for it. The end is reported like any other."""
        self._refusals.add("slow", f"a peer left {limits.MAX_QUEUED} frames unread")
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
        self._wire.close(LINGER_MS)

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
        self._wire.drain(LAST_WORDS)
        while self._silent > 0:
            self._silent -= 1
            self._refusals.add(
                "handshake", f"a connection ended before it said who it is: {self._failure or 'no ZMTP'}"
            )
        self._failure = ""

    def _bury(self) -> None:
        self._wire.drain(LAST_WORDS)
        gone, self._gone = self._gone, []
        for routing_id in gone:
            if self._callers.pop(routing_id, None) is not None:
                self._left(routing_id, GONE)


def _came_later(one: bytes, other: bytes) -> bool:
    """A ROUTER names its links with a zero byte and a number that it counts up, in the order in which they came, from anywhere."""
    difference = int.from_bytes(one[1:], "big") - int.from_bytes(other[1:], "big")
    return difference % 2**32 < 2**31
