"""An actor's side of `rubato tap`: gathers its frames for the peer that asks."""

import asyncio
import time

from rubato.bus.codec import decode_body
from rubato.bus.errors import BadFrame
from rubato.bus.link import Link, Peer
from rubato.bus.transport import Delivery, Transport
from rubato.runtime.dispatch import Dispatcher
from rubato.runtime.messages import NotTapped, Tap, Tapped, TappedFrame

HELD_BYTES = 2 * 1024 * 1024
"""Of frames between two asks; what exceeds it is counted and not kept."""

KEPT_S = 10.0
"""Time without an ask after which a tap ends by itself."""

MOST_WAIT_S = 5.0
"""However long the asker wants the answer held back."""


class FrameTap:
    """The actor's side: gathers frames for one peer at a time, from its first ask until it asks no more."""

    def __init__(self, transport: Transport, dispatch: Dispatcher) -> None:
        self._transport = transport
        self._dispatch = dispatch
        self._peer: Peer = b""
        self._until = 0.0
        self._frames: list[TappedFrame] = []
        self._size_bytes = self._lost = 0

    def asked(self, delivery: Delivery) -> None:
        """Answer a Tap, later."""
        loop = asyncio.get_running_loop()
        try:
            wait_s = min(max(0.0, decode_body(Tap, delivery.envelope.body).wait_s), MOST_WAIT_S)
        except BadFrame as error:
            self._dispatch.reply(delivery, NotTapped(str(error)))
            return
        if self._transport.tap is not None and delivery.peer != self._peer and loop.time() < self._until:
            self._dispatch.reply(delivery, NotTapped("another tap is on it already; try again later"))
            return
        if delivery.peer != self._peer:
            self._clear()
        self._peer = delivery.peer
        self._until = loop.time() + wait_s + KEPT_S
        self._transport.tap = self._seen
        loop.call_later(wait_s, self._answer, delivery)

    def forget(self, peer: Peer) -> None:
        """The link is gone."""
        if peer == self._peer:
            self._end()

    def _end(self) -> None:
        self._transport.tap = None
        self._clear()

    def _answer(self, delivery: Delivery) -> None:
        self._dispatch.reply(delivery, Tapped(tuple(self._frames), self._lost))
        self._clear()

    def _clear(self) -> None:
        self._frames = []
        self._size_bytes = self._lost = 0

    def _seen(self, link: Link, sent: bool, data: bytes | bytearray | memoryview) -> None:
        if link.peer == self._peer:
            return
        if asyncio.get_running_loop().time() > self._until:
            self._end()
        elif self._size_bytes + len(data) > HELD_BYTES:
            self._lost += 1
        else:
            self._size_bytes += len(data)
            peer = link.peer_name or str(link.peer)
            self._frames.append(TappedFrame(time.time(), sent, peer, bytes(data)))  # noqa: TID251 - shown to a person
