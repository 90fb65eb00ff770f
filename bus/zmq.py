"""Carries envelopes between processes: frames over connections, in order, each batch of a tick as few messages as possible.

Both ends speak ZMTP. Within a host the event loop does so itself, over Unix sockets (bus/unix/); between hosts libzmq does, with CURVE
(bus/libzmq/). Which one follows from the address, and nothing above a connection knows. Requests leave on the link that we
opened and replies come back on it, so each link has one owner, and when it breaks both sides know.

What ZeroMQ offers and we refuse, because each loses messages in silence:

- Chosen routing ids: a reconnecting peer is then mis-routed or ignored. We name the links of those who come; HELLO says who is behind one.
- Reconnecting: a DEALER delivers its queue to whoever binds the address next, be it another incarnation. A broken link is
  reported and dropped; the next `post` opens a new one.
- High-water marks: a ROUTER drops at the mark. What is queued is bounded by the credit of the runtime.

A dead process is noticed within milliseconds, a dead host or network by ZMTP heartbeats within 8 s, a process that was stopped within
12 s. Shorter stalls of an event loop are for the leases of the registry to notice.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from bus import limits
from bus.address import IPC, parse
from bus.chunks import join
from bus.codec import Envelope
from bus.connection import ABSENT, Connection, Rest
from bus.errors import BadAddress, BadFrame, LinkRefused
from bus.keys import Keys
from bus.link import Identity, Link, Peer, Refusals
from bus.transport import Delivery, FrameSeen
from bus.unix.connection import UnixConnection, dial
from bus.unix.listener import UnixListener

if TYPE_CHECKING:
    from bus.libzmq.context import ZmqContext

PUSH_ENVELOPES = 128
"""So many are sent without waiting for the end of the tick: the receiver works on them while the sender encodes the next."""


class _CarriedLink(Link):
    """A link and what carries it."""

    __slots__ = ("connection", "is_dirty", "is_over")

    def __init__(self, peer: Peer, identity: Identity, connection: Connection | None) -> None:
        super().__init__(peer, identity, accepted=isinstance(peer, bytes))
        self.connection = connection
        """None when none could be opened."""
        self.is_dirty = False
        self.is_over = False


class ZmqTransport:
    """The Transport between processes. It belongs to one thread: that of its event loop."""

    def __init__(self, identity: Identity, bind: str, *, public: str = "", keys: Keys | None = None) -> None:
        """`public` is a second, tcp address to bind, for peers on other hosts. With `keys`, tcp is CURVE wherever it is used."""
        self.identity = identity
        self.refusals = Refusals()
        self.tap: FrameSeen | None = None
        self._bind = bind
        self._public = public
        self._keys = keys
        self._address = ""
        self._links: dict[Peer, _CarriedLink] = {}
        self._dirty: list[_CarriedLink] = []
        self._flush_is_due = False
        self._is_running = False
        self._listener: UnixListener | None = None
        self._libzmq: ZmqContext | None = None
        self._heartbeat: asyncio.TimerHandle | None = None
        self.loop: asyncio.AbstractEventLoop
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
        self.loop = asyncio.get_running_loop()
        self._deliver, self._down = deliver, down
        try:
            self._address = self._listen(self._bind)
            if self._public:
                self._public = self._listen(self._public)
        except BadAddress:
            for rest in self._stop_listening():
                rest()
            raise
        self._is_running = True
        self._beat()

    def post(self, peer: Peer, envelope: Envelope, buffers: Sequence[memoryview | bytes] = ()) -> None:
        """See Transport. Raises BadFrame for what exceeds the limits of a frame. A link that a peer opened and that is gone takes nothing."""
        link = self._links.get(peer)
        if link is None:
            if isinstance(peer, bytes) or not self._is_running:
                return
            link = self._dial(peer)
        waiting = link.outbox.add(envelope, buffers)
        if not link.is_dirty:
            self._mark(link)
        elif waiting >= PUSH_ENVELOPES:
            self._send(link)

    async def close(self) -> None:
        """See Transport. Takes at most half a second per peer that does not read."""
        if not self._is_running:
            return
        self._flush()
        self._is_running = False
        rests = [rest for link in self._links.values() if (rest := self._release(link, linger=True)) is not None]
        self._links.clear()
        rests += self._stop_listening()
        await self.loop.run_in_executor(None, lambda: [rest() for rest in rests])

    # -- opening and closing ------------------------------------------------------------------------------------

    def _listen(self, where: str) -> str:
        address = parse(where, keyed=self._keys is not None)
        if address.scheme == IPC:
            self._listener = UnixListener(where, self)
            return where
        return self._tcp().bind(where)

    def _stop_listening(self) -> list[Rest]:
        if self._heartbeat is not None:
            self._heartbeat.cancel()
        rests = self._listener.close() if self._listener is not None else []
        return rests if self._libzmq is None else [*rests, self._libzmq.close()]

    def _tcp(self) -> "ZmqContext":
        """Made when it is needed first: a process that only talks within its host neither loads libzmq nor has its threads."""
        if self._libzmq is None:
            from bus.libzmq.context import ZmqContext

            self._libzmq = ZmqContext(self._keys, self)
        return self._libzmq

    def _dial(self, address: str) -> _CarriedLink:
        """Open a link. What fails here is reported like any other loss, at the end of the tick."""
        link = self._links[address] = _CarriedLink(address, self.identity, None)
        try:
            where = parse(address, keyed=self._keys is not None)
            link.connection = dial(where.place, address, self) if where.scheme == IPC else self._tcp().dial(address)
        except (FileNotFoundError, ConnectionRefusedError):
            self.loop.call_soon(self._lose, link, ABSENT)
        except (BadAddress, OSError) as error:
            self.loop.call_soon(self._lose, link, str(error))
        return link

    def _beat(self) -> None:
        """libzmq has heartbeats of its own; our streams have these."""
        self._heartbeat = self.loop.call_later(limits.HEARTBEAT_MS / 1000, self._beat)
        if self._listener is not None:
            self._listener.beat()
        for link in list(self._links.values()):
            if isinstance(link.connection, UnixConnection) and isinstance(link.peer, str):
                link.connection.beat()

    # -- sending ------------------------------------------------------------------------------------------------

    def _mark(self, link: _CarriedLink) -> None:
        link.is_dirty = True
        self._dirty.append(link)
        if not self._flush_is_due:
            self._flush_is_due = True
            self.loop.call_soon(self._flush)

    def drained(self) -> None:
        """See Owner. Whoever the messages woke runs before this flush and in the same turn of the loop, so that an answer does
        not cost a turn of its own."""
        if not self._flush_is_due:
            self._flush_is_due = True
            self.loop.call_soon(self._flush)

    def _flush(self) -> None:
        """End of the tick: send what was posted in it, as few messages as possible."""
        self._flush_is_due = False
        if not self._dirty:
            return
        dirty, self._dirty = self._dirty, []
        for link in dirty:
            link.is_dirty = False
            self._send(link)
        if self._libzmq is not None:
            for link in dirty:
                if link.connection is not None and not link.is_over:
                    link.connection.flushed()

    def _send(self, link: _CarriedLink) -> None:
        if link.connection is not None and not link.is_over:
            for frame in link.outbox.take():
                if self.tap is not None:
                    self.tap(link, True, frame.data)
                link.connection.send(frame.data, frame.buffers)

    # -- receiving ----------------------------------------------------------------------------------------------

    def heard(self, connection: Connection, first: memoryview, beside: Sequence[memoryview]) -> None:
        """See Owner."""
        link = self._links.get(connection.peer)
        if link is None and isinstance(connection.peer, bytes):
            link = self._links[connection.peer] = _CarriedLink(connection.peer, self.identity, connection)
        if link is not None and link.connection is connection:
            self._arrived(link, first, beside)

    def ended(self, connection: Connection, reason: str) -> None:
        """See Owner."""
        link = self._links.get(connection.peer)
        if link is not None and link.connection is connection:
            self._lose(link, reason)

    def _arrived(self, link: _CarriedLink, first: memoryview, beside: Sequence[memoryview]) -> None:
        if link.is_refused or link.is_over:
            return
        was_open = link.is_open
        try:
            envelopes = link.arrived(first)
            buffers = join(beside) if beside else ()
        except (BadFrame, LinkRefused) as error:
            self._refuse(link, error, was_open=was_open)
            return
        if self.tap is not None:
            self.tap(link, False, first)
        if not was_open and not link.is_dirty:
            self._mark(link)
        peer, deliver = link.peer, self._deliver
        last = envelopes.pop() if buffers else None
        for envelope in envelopes:
            if link.is_over:
                return
            deliver(Delivery(peer, envelope, ()))
        if last is not None and not link.is_over:
            deliver(Delivery(peer, last, buffers))

    def _refuse(self, link: _CarriedLink, error: BadFrame | LinkRefused, *, was_open: bool) -> None:
        """The peer may not go on. One that came to us is told, and not heard any more: a ROUTER cannot hang up on one peer."""
        reason = str(error)
        self.refusals.add(error.kind if isinstance(error, LinkRefused) else "frame", reason)
        if isinstance(link.peer, str):
            self._lose(link, reason)
            return
        link.refuse(reason)
        if not link.is_dirty:
            self._mark(link)
        if was_open:
            self._down(link.peer, reason)

    def _lose(self, link: _CarriedLink, reason: str) -> None:
        """A link ended under us: forget it, and say so once, if it is one the runtime knows."""
        peer = link.peer
        if self._links.get(peer) is not link:
            return
        del self._links[peer]
        self._release(link)
        if link.is_open or isinstance(peer, str):
            self._down(peer, reason)

    def _release(self, link: _CarriedLink, *, linger: bool = False) -> Rest | None:
        link.is_over = True
        return None if link.connection is None else link.connection.close(linger=linger)
