"""Knows which links that peers opened still live. A ROUTER does not tell, so its monitor's descriptors are matched with routing ids.

The monitor reports connections by file descriptor, and the operating system gives a descriptor away again as soon as it is
closed. Two facts of libzmq make the match certain nevertheless: the end of a connection is reported before its descriptor is
closed, and each message names the descriptor it came by. So once the monitor is read up to now, a descriptor that it does not
know to be connected belongs to a link that has ended; and of two links with one descriptor, the one with the lower number has.
"""

import asyncio
from collections.abc import Callable

import zmq

from bus.zmq_sockets import Context, Socket
from bus.zmq_wire import Arrived, Monitor, Wire

LAST_WORDS = 4096
"""Messages still read after a peer died, before its link is declared lost; far more than its credit allowed it to send."""


class Door:
    """The ROUTER and the connections to it. `left(routing_id)` is called once for each admitted link that ends."""

    def __init__(
        self,
        context: Context,
        router: Socket,
        loop: asyncio.AbstractEventLoop,
        came: Arrived,
        left: Callable[[bytes], None],
    ) -> None:
        self._loop = loop
        self._left = left
        self._connected: set[int] = set()
        self._links: dict[int, bytes] = {}
        self._gone: list[bytes] = []
        events = zmq.Event.ACCEPTED | zmq.Event.DISCONNECTED
        self._monitor = Monitor(context, router, "door", events, loop, self._changed)
        self.wire = Wire(router, loop, came, routed=True)

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
            self.gone_soon(newest)

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
            return
        self._connected.discard(descriptor)
        routing_id = self._links.pop(descriptor, None)
        if routing_id is not None:
            self.gone_soon(routing_id)

    def _bury(self) -> None:
        self.wire.drain(LAST_WORDS)
        gone, self._gone = self._gone, []
        for routing_id in gone:
            self._left(routing_id)


def _came_later(one: bytes, other: bytes) -> bool:
    """A ROUTER names its links with a zero byte and a number that it counts up, in the order in which they came, from anywhere."""
    difference = int.from_bytes(one[1:], "big") - int.from_bytes(other[1:], "big")
    return difference % 2**32 < 2**31
