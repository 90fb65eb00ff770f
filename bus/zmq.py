"""Carries envelopes between processes: frames over connections, in order, each batch of a tick as few messages as possible.

Both ends speak ZMTP. Within a host the event loop does so itself, over Unix sockets (bus/stream.py); between hosts libzmq does, with
CURVE (bus/zmq_host.py). Which one follows from the address, and nothing above a link's end knows. Requests leave on the link that we
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
from functools import partial
from typing import TYPE_CHECKING

from bus import limits
from bus.address import IPC, parse
from bus.chunks import join
from bus.end import ABSENT, End, Rest
from bus.envelope import Envelope
from bus.errors import BadAddress, BadFrame, LinkRefused
from bus.keys import Keys
from bus.link import Link
from bus.refusals import Refusals
from bus.stream import Stream, connected
from bus.stream_door import StreamDoor
from bus.transport import Delivery, Identity, Peer

if TYPE_CHECKING:
    from bus.zmq_host import ZmqHost

PUSH_ENVELOPES = 128
"""So many are sent without waiting for the end of the tick: the receiver works on them while the sender encodes the next."""


class _Line:
    """A link and what carries it."""

    __slots__ = ("end", "is_dirty", "is_over", "link")

    def __init__(self, link: Link, end: End | None) -> None:
        self.link = link
        self.end = end
        """None when none could be opened."""
        self.is_dirty = False
        self.is_over = False


class ZmqTransport:
    """The Transport between processes. It belongs to one thread: that of its event loop."""

    def __init__(self, identity: Identity, bind: str, *, public: str = "", keys: Keys | None = None) -> None:
        """`public` is a second, tcp address to bind, for peers on other hosts. With `keys`, tcp is CURVE wherever it is used."""
        self.identity = identity
        self.refusals = Refusals()
        self._bind = bind
        self._public = public
        self._keys = keys
        self._address = ""
        self._lines: dict[Peer, _Line] = {}
        self._dirty: list[_Line] = []
        self._flush_is_due = False
        self._is_running = False
        self._door: StreamDoor | None = None
        self._zmq: ZmqHost | None = None
        self._heartbeat: asyncio.TimerHandle | None = None
        self._loop: asyncio.AbstractEventLoop
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
        line = self._lines.get(peer)
        if line is None:
            if isinstance(peer, bytes) or not self._is_running:
                return
            line = self._dial(peer)
        waiting = line.link.outbox.add(envelope, buffers)
        if not line.is_dirty:
            self._mark(line)
        elif waiting >= PUSH_ENVELOPES:
            self._send(line)

    def disconnect(self, address: str) -> None:
        """See Transport."""
        line = self._lines.pop(address, None)
        if line is not None:
            self._release(line)

    async def close(self) -> None:
        """See Transport. Takes at most half a second per peer that does not read."""
        if not self._is_running:
            return
        self._flush()
        self._is_running = False
        rests = [rest for line in self._lines.values() if (rest := self._release(line, linger=True)) is not None]
        self._lines.clear()
        rests += self._stop_listening()
        await self._loop.run_in_executor(None, lambda: [rest() for rest in rests])

    # -- opening and closing ------------------------------------------------------------------------------------

    def _listen(self, where: str) -> str:
        address = parse(where, keyed=self._keys is not None)
        if address.scheme == IPC:
            self._door = StreamDoor(where, self._loop, self._came, self._left, self.refusals, self._read)
            return where
        return self._tcp().bind(where)

    def _stop_listening(self) -> list[Rest]:
        if self._heartbeat is not None:
            self._heartbeat.cancel()
        rests = self._door.close() if self._door is not None else []
        return rests if self._zmq is None else [*rests, self._zmq.close()]

    def _tcp(self) -> "ZmqHost":
        """Made when it is needed first: a process that only talks within its host neither loads libzmq nor has its threads."""
        if self._zmq is None:
            from bus.zmq_host import ZmqHost

            self._zmq = ZmqHost(self._loop, self._keys, self._came, self._left, self.refusals, self._read)
        return self._zmq

    def _dial(self, address: str) -> _Line:
        """Open a link. What fails here is reported like any other loss, at the end of the tick."""
        line = self._lines[address] = _Line(Link(address, self.identity, accepted=False), None)
        heard, ended = partial(self._arrived, line), partial(self._lose, line)
        try:
            where = parse(address, keyed=self._keys is not None)
            if where.scheme == IPC:
                connection = connected(where.place)
                line.end = Stream(connection, self._loop, b"DEALER", heard, self._read, ended)
            else:
                line.end = self._tcp().dial(address, heard, ended)
        except (FileNotFoundError, ConnectionRefusedError):
            self._loop.call_soon(self._lose, line, ABSENT)
        except (BadAddress, OSError) as error:
            self._loop.call_soon(self._lose, line, str(error))
        return line

    def _beat(self) -> None:
        """libzmq has heartbeats of its own; our streams have these."""
        self._heartbeat = self._loop.call_later(limits.HEARTBEAT_MS / 1000, self._beat)
        if self._door is not None:
            self._door.beat()
        for line in list(self._lines.values()):
            if isinstance(line.end, Stream) and isinstance(line.link.peer, str):
                line.end.beat()

    # -- sending ------------------------------------------------------------------------------------------------

    def _mark(self, line: _Line) -> None:
        line.is_dirty = True
        self._dirty.append(line)
        if not self._flush_is_due:
            self._flush_is_due = True
            self._loop.call_soon(self._flush)

    def _read(self) -> None:
        """Messages have arrived: whoever they woke runs before this flush and in the same turn of the loop, so that an answer does
        not cost a turn of its own."""
        if not self._flush_is_due:
            self._flush_is_due = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        """End of the tick: send what was posted in it, as few messages as possible."""
        self._flush_is_due = False
        if not self._dirty:
            return
        dirty, self._dirty = self._dirty, []
        for line in dirty:
            line.is_dirty = False
            self._send(line)
        if self._zmq is not None:
            for line in dirty:
                if line.end is not None and not line.is_over:
                    line.end.flushed()

    def _send(self, line: _Line) -> None:
        if line.end is not None and not line.is_over:
            for frame in line.link.outbox.take():
                line.end.send(frame.data, frame.buffers)

    # -- receiving ----------------------------------------------------------------------------------------------

    def _came(self, name: bytes, end: End, first: memoryview, beside: Sequence[memoryview]) -> None:
        """A message by a link that a peer opened."""
        line = self._lines.get(name)
        if line is None:
            line = self._lines[name] = _Line(Link(name, self.identity, accepted=True), end)
        self._arrived(line, first, beside)

    def _left(self, name: bytes, reason: str) -> None:
        line = self._lines.get(name)
        if line is not None:
            self._lose(line, reason)

    def _arrived(self, line: _Line, first: memoryview, beside: Sequence[memoryview]) -> None:
        link = line.link
        if link.is_refused or line.is_over:
            return
        was_open = link.is_open
        try:
            envelopes = link.arrived(first)
            buffers = join(beside) if beside else ()
        except (BadFrame, LinkRefused) as error:
            self._refuse(line, error, was_open=was_open)
            return
        if not was_open and not line.is_dirty:
            self._mark(line)
        peer, deliver = link.peer, self._deliver
        last = envelopes.pop() if buffers else None
        for envelope in envelopes:
            if line.is_over:
                return
            deliver(Delivery(peer, envelope, ()))
        if last is not None and not line.is_over:
            deliver(Delivery(peer, last, buffers))

    def _refuse(self, line: _Line, error: BadFrame | LinkRefused, *, was_open: bool) -> None:
        """The peer may not go on. One that came to us is told, and not heard any more: a ROUTER cannot hang up on one peer."""
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
        self._release(line)
        if line.link.is_open or isinstance(peer, str):
            self._down(peer, reason)

    def _release(self, line: _Line, *, linger: bool = False) -> Rest | None:
        line.is_over = True
        return None if line.end is None else line.end.close(linger=linger)
