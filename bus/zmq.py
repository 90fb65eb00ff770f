"""Carries envelopes between processes: one ROUTER that peers come to, and one DEALER for each peer we go to.

Requests leave on the DEALER and replies come back on it, so each link has one owner, and when it breaks both sides know.
What ZeroMQ offers and we refuse, because each loses messages in silence:

- Chosen routing ids: a reconnecting peer is then mis-routed or ignored. The ROUTER names its links; HELLO says who is behind one.
- Reconnecting: a DEALER delivers its queue to whoever binds the address next, be it another incarnation. A broken link is
  reported and dropped; the next `post` opens a new one.
- High-water marks: a ROUTER drops at the mark. They are 0, and the credit of the runtime bounds what is queued.

A dead process is noticed within milliseconds by the socket monitors, a dead host or network by ZMTP heartbeats within 8 s. A
stalled event loop is neither: libzmq's own thread answers heartbeats. That one is for the leases of the registry to notice.
"""

import asyncio
import itertools
from collections.abc import Callable, Sequence

import zmq

from bus.chunks import join
from bus.envelope import Envelope
from bus.errors import BadAddress, BadFrame, LinkRefused
from bus.keys import Keys
from bus.link import Link
from bus.refusals import Refusals
from bus.transport import Delivery, Identity, Peer
from bus.zmq_door import LAST_WORDS, Door
from bus.zmq_sockets import MAX_QUEUED, Context, bind_to, connect_to, new_context, new_dealer, new_router, remove_path
from bus.zmq_wire import Monitor, Wire
from bus.zmq_zap import Zap

LINGER_MS = 500
"""What was posted before `close` has so long to leave; on one host it needs a millisecond."""

PUSH_ENVELOPES = 128
"""So many are sent without waiting for the end of the tick: the receiver works on them while the sender encodes the next."""

_OVER = {
    zmq.Event.CLOSED: "nobody listens there",
    zmq.Event.DISCONNECTED: "the peer closed the connection or died",
    zmq.Event.HANDSHAKE_FAILED_NO_DETAIL: "the peer does not speak ZMTP",
    zmq.Event.HANDSHAKE_FAILED_PROTOCOL: "the peer does not speak ZMTP",
    zmq.Event.HANDSHAKE_FAILED_AUTH: "the peer refused our keys",
}


class _Line:
    """A link and the socket it uses: its own DEALER, or the ROUTER under the peer's routing id."""

    __slots__ = ("is_dirty", "link", "monitor", "routing_id", "wire")

    def __init__(self, link: Link, wire: Wire | None, routing_id: bytes) -> None:
        self.link = link
        self.wire = wire
        """None once the line is over."""
        self.monitor: Monitor | None = None
        self.routing_id = routing_id
        self.is_dirty = False


class ZmqTransport:
    """The Transport between processes. Like ZeroMQ's sockets it belongs to one thread: that of its event loop."""

    def __init__(self, identity: Identity, bind: str, *, public: str = "", keys: Keys | None = None) -> None:
        """`public` is a second, tcp address to bind, for peers on other hosts. With `keys`, tcp is CURVE wherever it is used."""
        self.identity = identity
        self.refusals = Refusals()
        self._bind = bind
        self._public = public
        self._keys = keys
        self._zap: Zap | None = None
        self._address = ""
        self._lines: dict[Peer, _Line] = {}
        self._dirty: list[_Line] = []
        self._flush_is_due = False
        self._names = itertools.count(1)
        self._is_running = False
        self._context: Context
        self._loop: asyncio.AbstractEventLoop
        self._door: Door
        self._deliver: Callable[[Delivery], None]
        self._down: Callable[[Peer, str], None]

    @property
    def address(self) -> str:
        """Where peers reach us; known once `start` has returned."""
        return self._address

    @property
    def public_address(self) -> str:
        """Where peers on other hosts reach us, if they can."""
        return self._public

    async def start(self, deliver: Callable[[Delivery], None], down: Callable[[Peer, str], None]) -> None:
        """See Transport. Raises BadAddress also for an address that is malformed or would need keys."""
        self._loop = asyncio.get_running_loop()
        self._deliver, self._down = deliver, down
        self._context = new_context()
        router = new_router(self._context)
        # The door listens to the socket before the first peer can come.
        self._door = Door(self._context, router, self._loop, self._came, self._left, self.refusals, self._flush_soon)
        if self._keys is not None:
            allowed = frozenset({self._keys.client.public})
            self._zap = Zap(self._context, self._loop, allowed, lambda said: self.refusals.add("key", said))
        try:
            self._address = bind_to(router, self._bind, self._keys)
            self._door.bound(self._address)
            if self._public:
                self._public = bind_to(router, self._public, self._keys)
                self._door.bound(self._public)
        except BadAddress:
            remove_path(self._address or "mem://unbound")
            self._close_door(0)
            self._context.term()
            raise
        self._is_running = True

    def post(self, peer: Peer, envelope: Envelope, buffers: Sequence[memoryview | bytes] = ()) -> None:
        """See Transport. Raises BadFrame for what exceeds the limits of a frame. A link that a peer opened and that is gone takes nothing."""
        line = self._lines.get(peer)
        if line is None:
            if isinstance(peer, bytes) or not self._is_running:
                return
            line = self._dial(peer)
        waiting = line.link.outbox.add(envelope, buffers)
        if not line.is_dirty:
            self._mark(line)
        elif waiting >= PUSH_ENVELOPES and line.wire is not None:
            self._send(line, line.wire)

    def disconnect(self, address: str) -> None:
        """See Transport."""
        line = self._lines.pop(address, None)
        if line is not None:
            self._release(line, 0)

    async def close(self) -> None:
        """See Transport. Takes at most half a second, and only when a peer does not read."""
        if not self._is_running:
            return
        self._flush()
        self._is_running = False
        for line in self._lines.values():
            self._release(line, LINGER_MS)
        self._lines.clear()
        # libzmq leaves the socket's file behind. While we still listen on it nobody else can have taken the path.
        remove_path(self._address)
        self._close_door(LINGER_MS)
        # Waits for the last sends; the context, unlike its sockets, may be used from any thread.
        await self._loop.run_in_executor(None, self._context.term)

    def _close_door(self, linger_ms: int) -> None:
        self._door.close(linger_ms)
        if self._zap is not None:
            self._zap.close()

    def _dial(self, address: str) -> _Line:
        """Open a link. What fails here is reported like any other loss, at the end of the tick."""
        line = self._lines[address] = _Line(Link(address, self.identity, accepted=False), None, b"")
        dealer = None
        try:
            dealer = new_dealer(self._context)
            name = f"line-{next(self._names)}"
            line.monitor = Monitor(
                self._context, dealer, name, sum(_OVER), self._loop, lambda event, _: self._changed(line, event)
            )
            connect_to(dealer, address, self._keys)
        except (BadAddress, zmq.ZMQError) as error:
            if line.monitor is not None:
                line.monitor.close()
            if dealer is not None:
                dealer.close(0)
            self._loop.call_soon(self._lose, line, str(error))
        else:
            line.wire = Wire(
                dealer,
                self._loop,
                lambda _, first, beside: self._arrived(line, first, beside),
                drained=self._flush_soon,
            )
        return line

    def _mark(self, line: _Line) -> None:
        line.is_dirty = True
        self._dirty.append(line)
        if not self._flush_is_due:
            self._flush_soon()

    def _flush_soon(self) -> None:
        """Also called when messages have arrived: whoever they woke runs before this flush and in the same turn of the loop, so that
        an answer does not cost a turn of its own."""
        if not self._flush_is_due:
            self._flush_is_due = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        """End of the tick: send what was posted in it, as few messages as possible."""
        self._flush_is_due = False
        if not self._dirty:
            return
        dirty, self._dirty = self._dirty, []
        used: set[Wire] = set()
        for line in dirty:
            line.is_dirty = False
            if line.wire is not None:
                used.add(line.wire)
                self._send(line, line.wire)
        for wire in used:
            wire.flushed()

    def _send(self, line: _Line, wire: Wire) -> None:
        try:
            for data, buffers in line.link.outbox.take():
                wire.send(line.routing_id, data, buffers)
        except zmq.ZMQError as error:
            if line.routing_id and error.errno == zmq.EAGAIN:
                self._too_slow(line)
                return
            # The peer is gone, but what it said before may still wait to be read. Said later: this may run inside `post`.
            if line.routing_id:
                self._door.gone_soon(line.routing_id)
            else:
                self._loop.call_soon(self._changed, line, zmq.Event.DISCONNECTED)

    def _too_slow(self, line: _Line) -> None:
        """A peer that came to us does not read what we answer: its connection ends, and frees what is queued for it."""
        self.refusals.add("slow", f"{line.link.peer_name} left {MAX_QUEUED} frames unread")
        self._door.hang_up(line.routing_id)

    def _came(self, routing_id: bytes, first: zmq.Frame, beside: list[memoryview]) -> None:
        """A message on the ROUTER."""
        line = self._lines.get(routing_id)
        if line is None:
            line = _Line(Link(routing_id, self.identity, accepted=True), self._door.wire, routing_id)
            self._lines[routing_id] = line
            self._door.admit(routing_id, first)
        self._arrived(line, first, beside)

    def _left(self, routing_id: bytes) -> None:
        line = self._lines.get(routing_id)
        if line is not None:
            self._lose(line, _OVER[zmq.Event.DISCONNECTED])

    def _changed(self, line: _Line, event: zmq.Event) -> None:
        """The monitor of a DEALER: all it reports is an end. What the peer said before comes first."""
        if line.wire is not None:
            line.wire.drain(LAST_WORDS)
            self._lose(line, _OVER[event])

    def _arrived(self, line: _Line, first: zmq.Frame, beside: list[memoryview]) -> None:
        link = line.link
        if link.is_refused:
            return
        was_open = link.is_open
        try:
            envelopes = link.arrived(first.buffer)
            buffers = join(beside)
        except (BadFrame, LinkRefused) as error:
            self._refuse(line, error, was_open=was_open)
            return
        if not was_open and not line.is_dirty:
            self._mark(line)
        peer, deliver = link.peer, self._deliver
        last = envelopes.pop() if buffers else None
        for envelope in envelopes:
            if line.wire is None:
                return
            deliver(Delivery(peer, envelope, ()))
        if last is not None and line.wire is not None:
            deliver(Delivery(peer, last, buffers))

    def _refuse(self, line: _Line, error: BadFrame | LinkRefused, *, was_open: bool) -> None:
        """The peer may not go on. A ROUTER cannot hang up on one peer, so one that came to us is told, and not heard any more."""
        reason = str(error)
        self.refusals.add(error.kind if isinstance(error, LinkRefused) else "frame", reason)
        if isinstance(line.link.peer, str):
            self._lose(line, reason)
            return
        line.link.refuse(reason)
        if not line.is_dirty:
            self._mark(line)
        if was_open:
            self._down(line.link.peer, reason)

    def _lose(self, line: _Line, reason: str) -> None:
        """A link ended under us: forget it, and say so once, if it is one the runtime knows."""
        peer = line.link.peer
        if self._lines.get(peer) is not line:
            return
        del self._lines[peer]
        self._release(line, 0)
        if line.link.is_open or isinstance(peer, str):
            self._down(peer, reason)

    def _release(self, line: _Line, linger_ms: int) -> None:
        """Close the sockets that the line owns; the ROUTER is the door's."""
        wire, line.wire = line.wire, None
        if line.monitor is not None:
            line.monitor.close()
            if wire is not None:
                wire.close(linger_ms)
