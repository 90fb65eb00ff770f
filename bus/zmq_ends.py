"""Our ends of the links that libzmq carries: a DEALER of their own for those that we open, the one ROUTER for those that peers do."""

import asyncio
from collections.abc import Callable, Sequence

import zmq

from bus.end import ABSENT, GONE
from bus.errors import BadAddress
from bus.keys import Keys
from bus.zmq_sockets import Context, connect_to, new_dealer
from bus.zmq_wire import LAST_WORDS, SocketMonitor, Wire
from bus.zmtp import Heard

LINGER_MS = 500

_OVER = {
    zmq.Event.CLOSED: ABSENT,
    zmq.Event.DISCONNECTED: GONE,
    zmq.Event.HANDSHAKE_FAILED_NO_DETAIL: "the peer does not speak ZMTP",
    zmq.Event.HANDSHAKE_FAILED_PROTOCOL: "the peer does not speak ZMTP",
    zmq.Event.HANDSHAKE_FAILED_AUTH: "the peer refused our keys",
}


class Dealer:
    """A DEALER connected to `address`. `ended(reason)` is called for each sign that the link is over."""

    def __init__(
        self,
        context: Context,
        name: str,
        address: str,
        keys: Keys | None,
        loop: asyncio.AbstractEventLoop,
        heard: Heard,
        drained: Callable[[], None],
        ended: Callable[[str], None],
    ) -> None:
        """Raises BadAddress, and zmq.ZMQError when there are no more sockets. `name` is for this context alone."""
        self._loop = loop
        self._ended = ended
        dealer = new_dealer(context)
        try:
            self._monitor = SocketMonitor(
                context, dealer, name, sum(_OVER), loop, lambda event, _: self._changed(event)
            )
        except zmq.ZMQError:
            dealer.close(0)
            raise
        try:
            connect_to(dealer, address, keys)
        except BadAddress:
            self._monitor.close()
            dealer.close(0)
            raise
        self._wire = Wire(dealer, loop, lambda _, first, beside: heard(first.buffer, beside), drained=drained)

    def send(self, data: bytes | bytearray, buffers: Sequence[memoryview | bytes]) -> None:
        """See End."""
        try:
            self._wire.send(b"", data, buffers)
        except zmq.ZMQError:
            # Said later: this may run inside `post`.
            self._loop.call_soon(self._changed, zmq.Event.DISCONNECTED)

    def flushed(self) -> None:
        """See End."""
        self._wire.flushed()

    def close(self, *, linger: bool = False) -> None:
        """See End. What lingers leaves before the context is terminated."""
        self._monitor.close()
        self._wire.close(LINGER_MS if linger else 0)

    def _changed(self, event: zmq.Event) -> None:
        """The monitor: all it reports is an end. What the peer said before comes first."""
        self._wire.drain(LAST_WORDS)
        self._ended(_OVER[event])


class Caller:
    """A peer that came to our ROUTER, which `wire` reads. `gone` and `slow` are called when it can't be sent to."""

    __slots__ = ("_gone", "_routing_id", "_slow", "_wire")

    def __init__(
        self, wire: Wire, routing_id: bytes, gone: Callable[[bytes], None], slow: Callable[[bytes], None]
    ) -> None:
        self._wire = wire
        self._routing_id = routing_id
        self._gone = gone
        self._slow = slow

    def send(self, data: bytes | bytearray, buffers: Sequence[memoryview | bytes]) -> None:
        """See End."""
        try:
            self._wire.send(self._routing_id, data, buffers)
        except zmq.ZMQError as error:
            # One that is gone may have said something before that still waits to be read.
            (self._slow if error.errno == zmq.EAGAIN else self._gone)(self._routing_id)

    def flushed(self) -> None:
        """See End."""
        self._wire.flushed()

    def close(self, *, linger: bool = False) -> None:
        """The ROUTER stays: it is the door's."""
