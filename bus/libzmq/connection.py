"""Our ends of the links that libzmq carries: a DEALER of their own for those that we open, the one ROUTER for those that peers do."""

from collections.abc import Callable, Sequence

import zmq

from bus.connection import ABSENT, GONE, Owner
from bus.errors import BadAddress
from bus.keys import Keys
from bus.libzmq.options import Context, connect_to, new_dealer
from bus.libzmq.socket import LAST_WORDS, LoopSocket, SocketMonitor
from bus.link import Peer

LINGER_MS = 500

_OVER = {
    zmq.Event.CLOSED: ABSENT,
    zmq.Event.DISCONNECTED: GONE,
    zmq.Event.HANDSHAKE_FAILED_NO_DETAIL: "the peer does not speak ZMTP",
    zmq.Event.HANDSHAKE_FAILED_PROTOCOL: "the peer does not speak ZMTP",
    zmq.Event.HANDSHAKE_FAILED_AUTH: "the peer refused our keys",
}


class Dialled:
    """A DEALER connected to `address`. Its owner is told of each sign that the link is over."""

    def __init__(self, context: Context, name: str, address: str, keys: Keys | None, owner: Owner) -> None:
        """Raises BadAddress, and zmq.ZMQError when there are no more sockets. `name` is for this context alone."""
        self.peer: Peer = address
        self._owner = owner
        dealer = new_dealer(context)
        try:
            self._monitor = SocketMonitor(
                context, dealer, name, sum(_OVER), owner.loop, lambda event, _: self._changed(event)
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
        self._socket = LoopSocket(
            dealer,
            owner.loop,
            lambda _, first, beside: owner.heard(self, first.buffer, beside),
            drained=owner.drained,
        )

    def send(self, data: bytes | bytearray, buffers: Sequence[memoryview | bytes]) -> None:
        """See Connection."""
        try:
            self._socket.send(b"", data, buffers)
        except zmq.ZMQError:
            # Said later: this may run inside `post`.
            self._owner.loop.call_soon(self._changed, zmq.Event.DISCONNECTED)

    def flushed(self) -> None:
        """See Connection."""
        self._socket.flushed()

    def close(self, *, linger: bool = False) -> None:
        """See Connection. What lingers leaves before the context is terminated."""
        self._monitor.close()
        self._socket.close(LINGER_MS if linger else 0)

    def _changed(self, event: zmq.Event) -> None:
        """The monitor: all it reports is an end. What the peer said before comes first."""
        self._socket.drain(LAST_WORDS)
        self._owner.ended(self, _OVER[event])


class TakenIn:
    """A peer that came to our ROUTER, which `router` reads. `gone` and `slow` are called when it can't be sent to."""

    __slots__ = ("_gone", "_router", "_routing_id", "_slow", "peer")

    def __init__(
        self, router: LoopSocket, routing_id: bytes, gone: Callable[[bytes], None], slow: Callable[[bytes], None]
    ) -> None:
        self.peer: Peer = routing_id
        self._routing_id = routing_id
        self._router = router
        self._gone = gone
        self._slow = slow

    def send(self, data: bytes | bytearray, buffers: Sequence[memoryview | bytes]) -> None:
        """See Connection."""
        try:
            self._router.send(self._routing_id, data, buffers)
        except zmq.ZMQError as error:
            # One that is gone may have said something before that still waits to be read.
            (self._slow if error.errno == zmq.EAGAIN else self._gone)(self._routing_id)

    def flushed(self) -> None:
        """See Connection."""
        self._router.flushed()

    def close(self, *, linger: bool = False) -> None:
        """The ROUTER stays: it is the listener's."""
