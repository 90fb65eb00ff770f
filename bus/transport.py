"""The seam between the runtime and the wire: envelopes to and from peers, in order per link, never blocking.

Three words for what is between two processes. A *link* is what they say to each other, HELLO first (bus/link.py). A *connection* is our
end of what carries it. A *listener* is where the connections of others come in. Between processes bus/zmq.py carries the frames,
within one bus/memory.py.
"""

import asyncio
import contextvars
from collections.abc import Callable, Sequence

import msgspec

from rubato.bus.codec import Envelope, join
from rubato.bus.errors import BadAddress, BadFrame, LinkRefused
from rubato.bus.link import Connection, Identity, Link, Peer, Refusals, Rest

GONE = "the peer closed the connection or died"
ABSENT = "nothing listens there"

LAST_SENDS_S = 0.5
"""What was posted before a transport closes has so long to leave; on one host it needs a millisecond."""

PUSH_ENVELOPES = 128
"""So many are sent without waiting for the end of the tick: the receiver works on them while the sender encodes the next."""


class Delivery(msgspec.Struct, gc=False):
    """One envelope as it arrived, with its out-of-band buffers and the peer to answer. A struct: made six times faster than a tuple with names."""

    peer: Peer
    envelope: Envelope
    buffers: Sequence[memoryview]
    deadline: float = 0.0
    """Loop time by which the sender wants its reply, 0 for none; the receiving runtime works it out from the envelope's budget."""


FrameSeen = Callable[[Link, bool, bytes | bytearray | memoryview], None]
"""Sees a frame on its link; True for one that we send."""

Down = Callable[[Peer, str, str], None]
"""`down(peer, reason, refusal)`: a link is over; `refusal` is what the peer said where it refused the link, else empty."""


class Transport:
    """Moves envelopes. Order is kept per link; a lost link loses a suffix of what was in flight, and says so.

    Belongs to one thread: that of its event loop. Subclasses say what carries the bytes.
    """

    def __init__(self, identity: Identity, address: str, public_address: str = "") -> None:
        self.identity = identity
        self.address = address
        """Where peers reach us; known once `start` has returned."""
        self.public_address = public_address
        """Where peers on other hosts reach us; empty when only this host can."""
        self.refusals = Refusals()
        """Who and what was turned away here, for the runtime to count and log."""
        self.tap: FrameSeen | None = None
        """Sees every frame that arrives or leaves, while there is one. It must not post."""
        self.after_sends: list[Callable[[], None]] = []
        """Called once each, after the last sends of this tick."""
        self.loop: asyncio.AbstractEventLoop
        self.context: contextvars.Context
        """The context it was started in; what arrives is handed over in it."""
        self._links: dict[Peer, Link] = {}
        self._dirty: list[Link] = []
        self._flush_is_due = False
        self._is_running = False
        self._deliver: Callable[[Delivery], None]
        self._down: Down

    async def start(self, deliver: Callable[[Delivery], None], down: Down) -> None:
        """Bind, then call `deliver` for every arriving envelope and `down(peer, reason, refusal)` once per lost or refused link.

        Both callbacks run on the event loop and must not block. Raises BadAddress when the endpoint is taken, malformed or would
        need keys.
        """
        self.loop, self.context = asyncio.get_running_loop(), contextvars.copy_context()
        self._deliver, self._down = deliver, down
        self._listen()
        self._is_running = True

    def post(self, peer: Peer, envelope: Envelope, buffers: Sequence[memoryview | bytes] = ()) -> None:
        """Queue for `peer`; all envelopes of one loop tick travel together. Opens the link on first use to an address.

        Never blocks and never drops while the link lives; what bounds the queue is the credit that the runtime keeps. What is posted to
        a link that a peer opened and that is gone, is lost with it. Buffers are not copied: leave them alone until the peer has them.
        Raises BadFrame for what exceeds a frame's limits.
        """
        link = self._links.get(peer)
        if link is None:
            if isinstance(peer, bytes) or not self._is_running:
                return
            link = self._open(peer)
        waiting = link.outbox.add(envelope, buffers)
        if not link.is_dirty:
            self._mark(link)
        elif waiting >= PUSH_ENVELOPES:
            self._send(link)

    async def close(self) -> None:
        """Flush briefly, then release everything: half a second at most per peer that does not read. Afterwards nothing is delivered."""
        if self._is_running:
            self._flush()
            if rests := self._end(linger=True):
                await self.loop.run_in_executor(None, lambda: [rest() for rest in rests])

    # -- what a subclass says ---------------------------------------------------------------------------------------

    def _listen(self) -> None:
        """Bind `address`, and `public_address` if there is one. Raises BadAddress; nothing is bound then."""
        raise NotImplementedError

    def _dial(self, address: str) -> Connection:
        """A connection to the process that listens there. Raises BadAddress or OSError."""
        raise NotImplementedError

    def _stop_listening(self) -> list[Rest]:
        """Take in no further peer; what is returned is still to be called."""
        raise NotImplementedError

    # -- what connections and listeners report, on the event loop ------------------------------------------------------

    def heard(self, connection: Connection, first: memoryview, beside: Sequence[memoryview]) -> None:
        """A message: its frame, and the parts beside it."""
        link = self._links.get(connection.peer)
        if link is None and isinstance(connection.peer, bytes):
            link = self._links[connection.peer] = Link(connection.peer, self.identity, connection)
        if link is not None and link.connection is connection:
            self._arrived(link, first, beside)

    def drained(self) -> None:
        """Called after messages were handed to `heard` because a socket had become readable.

        The tasks that the messages woke run before this flush and in the same turn of the loop, so that an answer does not cost a turn of
        its own.
        """
        if not self._flush_is_due:
            self._flush_is_due = True
            self.loop.call_soon(self._flush, context=self.context)

    def ended(self, connection: Connection, reason: str) -> None:
        """The connection is over, and not because we closed it. Later than whatever found out, and after its last words."""
        link = self._links.get(connection.peer)
        if link is not None and link.connection is connection:
            self._lose(link, reason)

    # -- sending --------------------------------------------------------------------------------------------------------

    def _open(self, address: str) -> Link:
        """A new link. What fails here is reported like any other loss, at the end of the tick."""
        link = self._links[address] = Link(address, self.identity)
        try:
            link.connection = self._dial(address)
        except (FileNotFoundError, ConnectionRefusedError):
            self.loop.call_soon(self._lose, link, ABSENT)
        except (BadAddress, OSError) as error:
            self.loop.call_soon(self._lose, link, str(error))
        return link

    def _mark(self, link: Link) -> None:
        link.is_dirty = True
        self._dirty.append(link)
        if not self._flush_is_due:
            self._flush_is_due = True
            self.loop.call_soon(self._flush, context=self.context)

    def _flush(self) -> None:
        """End of the tick: send what was posted in it, as few messages as possible."""
        self._flush_is_due = False
        if not self._dirty:
            return
        dirty, self._dirty = self._dirty, []
        for link in dirty:
            link.is_dirty = False
            self._send(link)
        if self.after_sends:
            for call in self.after_sends:
                call()
            self.after_sends.clear()

    def _send(self, link: Link) -> None:
        if link.connection is not None and not link.is_over:
            for frame in link.outbox.take():
                if self.tap is not None:
                    self.tap(link, True, frame.data)
                link.connection.send(frame.data, frame.buffers)

    # -- receiving ------------------------------------------------------------------------------------------------------

    def _arrived(self, link: Link, first: memoryview, beside: Sequence[memoryview]) -> None:
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

    def _refuse(self, link: Link, error: BadFrame | LinkRefused, *, was_open: bool) -> None:
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
            self._down(link.peer, reason, "")

    # -- the end of links -----------------------------------------------------------------------------------------------

    def _lose(self, link: Link, reason: str) -> None:
        """A link ended under us: forget it, and say so once, if it is one the runtime knows."""
        peer = link.peer
        if self._links.get(peer) is not link:
            return
        del self._links[peer]
        self._release(link)
        if link.is_open or isinstance(peer, str):
            self._down(peer, reason, link.refusal)

    def _release(self, link: Link, *, linger: bool = False) -> Rest | None:
        link.is_over = True
        return None if link.connection is None else link.connection.close(linger=linger)

    def _end(self, *, linger: bool) -> list[Rest]:
        self._is_running = False
        rests = [rest for link in self._links.values() if (rest := self._release(link, linger=linger)) is not None]
        self._links.clear()
        self._dirty.clear()
        return rests + self._stop_listening()


# -- within one process ------------------------------------------------------------------------------------------------
