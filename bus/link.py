"""One link, without I/O: who may speak on it, what waits to leave on it, how much may be sent, and who was turned away.

HELLO is first; a peer of another run or protocol is refused, never guessed at. The side that opened a link does not wait for WELCOME
before it posts: a refusal costs it nothing but what it posted meanwhile.

Credit is how much one sender may have queued at one actor: granted - consumed >= 0, so the receiver's queue never holds more than it
granted. Sender and receiver compute the charge of a message alike, from its size.
"""

import resource
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, TypeVar

import msgspec

from rubato.bus.codec import MAX_ENVELOPES, MAX_FRAME_BYTES, NOT_OURS, Envelope, EnvelopeKind, check_buffers, decode_frame
from rubato.bus.errors import BadFrame, LinkRefused

PROTOCOL = 2
"""Changes when an old process could misread a new one's envelopes."""

Peer = str | bytes
"""A `str` is the address of a peer's bound endpoint (we opened the link); `bytes` names a link a peer opened to us."""

BodyT = TypeVar("BodyT")

_HANDSHAKE = frozenset({EnvelopeKind.HELLO, EnvelopeKind.WELCOME, EnvelopeKind.REFUSED})

_encode_into = msgspec.msgpack.Encoder().encode_into

FULL_BYTES = 256 * 1024
"""A frame is closed once it has this much: larger ones save nothing more and make the receiver's loop stutter."""

_EMPTY = b"\xdc\0\0"
"""The header of a MessagePack array with room for any count, so it can be written last."""

_END = -1


# -- what one peer may cost an endpoint, on every kind of connection -----------------------------------------------

HEARTBEAT_MS = 2000
DEAD_MS = 6000
"""Three heartbeats missed. libzmq's own thread answers them, so a busy event loop is never taken for a dead one."""

HANDSHAKE_MS = 5000
"""A connection that has not finished ZMTP's handshake by then is dropped: a stranger holds no memory here."""

MAX_QUEUED = 4096
"""Frames in each direction between us and one peer that came to us. Credit keeps honest peers far below. Beyond it a sender is not
read from until we caught up, and one that does not read its replies is hung up on (a ROUTER that must deliver says so and drops nothing)."""

MAX_CONNECTIONS = 4096
"""Each costs some 30 KiB before its peer has said a word."""


def most_connections() -> int:
    """Half of the files that this process may have open, so that a flood of connections never keeps it from opening others."""
    return min(MAX_CONNECTIONS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)


# -- who is at the other end ------------------------------------------------------------------------------------------


class Identity(NamedTuple):
    """Who we are on every link, sent as the first message of each; a link of another run is refused."""

    run_id: str
    name: str
    incarnation: int
    schema: str = ""
    """Fingerprint of the job's message types; two that differ do not talk. Empty, as in a client of another language, is not compared."""


class News(NamedTuple):
    """One reason that struck since the last look: how often in all, and its newest case."""

    reason: str
    total: int
    sentence: str


class Refusals:
    """Reasons are `key`, `handshake`, `full`, `run`, `protocol`, `schema`, `greeting`, `frame` and `slow`."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        self._news: dict[str, str] = {}

    def add(self, reason: str, sentence: str) -> None:
        self.counts[reason] = self.counts.get(reason, 0) + 1
        self._news[reason] = sentence

    def news(self) -> list[News]:
        """What happened since this was last called."""
        news, self._news = self._news, {}
        return [News(reason, self.counts[reason], sentence) for reason, sentence in news.items()]


class Frame(msgspec.Struct, gc=False):
    """Envelopes that travel together; `buffers` belong to the last one, which is why it is the last."""

    data: bytes | bytearray
    buffers: Sequence[memoryview | bytes]


class Outbox:
    """Not bounded by itself: what may wait here is what the receivers granted as credit."""

    __slots__ = ("_closed", "_count", "_data")

    def __init__(self) -> None:
        self._data = bytearray(_EMPTY)
        self._count = 0
        self._closed: list[Frame] = []

    def add(self, envelope: Envelope, buffers: Sequence[memoryview | bytes] = ()) -> int:
        """Append in order; how many envelopes wait for their frame to close. Raises BadFrame, leaving the outbox as it was, when the envelope exceeds a limit."""
        data = self._data
        before = len(data)
        try:
            _encode_into(envelope, data, _END)
        except (TypeError, *NOT_OURS) as error:
            del data[before:]
            raise BadFrame(f"an envelope for {envelope.target!r} cannot be encoded: {error}") from error
        if buffers or len(data) > FULL_BYTES:
            self._check(envelope, buffers, before)
        self._count = waiting = self._count + 1
        if buffers or waiting == MAX_ENVELOPES:
            self._close(buffers)
        return waiting

    def take(self) -> list[Frame]:
        """Everything added so far, in order; the outbox is empty afterwards."""
        if self._count:
            self._close(())
        frames = self._closed
        self._closed = []
        return frames

    def _check(self, envelope: Envelope, buffers: Sequence[memoryview | bytes], before: int) -> None:
        """The envelope that was added from `before` on: too much for any frame, or for this one."""
        data = self._data
        try:
            if (size := len(data) - before) > MAX_FRAME_BYTES - len(_EMPTY):
                raise BadFrame(f"an envelope for {envelope.target!r} takes {size} bytes, a frame {MAX_FRAME_BYTES}")
            check_buffers(buffers)
        except BadFrame:
            del data[before:]
            raise
        if len(data) > FULL_BYTES and self._count:
            last = data[before:]
            del data[before:]
            self._close(())
            self._data += last

    def _close(self, buffers: Sequence[memoryview | bytes]) -> None:
        data = self._data
        data[1:3] = self._count.to_bytes(2, "big")
        self._closed.append(Frame(data, buffers))
        self._data = bytearray(_EMPTY)
        self._count = 0


class Greeting(msgspec.Struct, array_like=True, frozen=True):
    """Body of HELLO and WELCOME."""

    protocol: int
    run_id: str
    name: str
    incarnation: int
    schema: str = ""


Rest = Callable[[], None]
"""Blocks until the peer has taken what was unsent, but not for longer than `LAST_SENDS_S`. May run in any thread."""


class Connection(Protocol):
    """Sends frames to one peer. That the peer has gone is never raised; its transport is told, later."""

    @property
    def peer(self) -> Peer:
        """The address it was opened to, or the name under which the listener took it in."""
        ...

    def send(self, data: bytes | bytearray, buffers: Sequence[memoryview | bytes]) -> None:
        """Queue one frame and the buffers beside it."""
        ...

    def close(self, *, linger: bool = False) -> Rest | None:
        """Stop reading and close; with `linger`, what is unsent leaves once the result, if any, has been called."""
        ...


class Link:
    """State of one end, which the peer opened or we did."""

    __slots__ = (
        "_accepted", "_identity", "connection", "is_dirty", "is_open", "is_over", "is_refused", "outbox", "peer", "peer_name",
        "refusal",
    )  # fmt: skip

    def __init__(self, peer: Peer, identity: Identity, connection: Connection | None = None) -> None:
        self.peer = peer
        self.connection = connection
        """What carries it; None when none could be opened."""
        self.peer_name = ""
        """The peer's actor, once it has greeted us."""
        self.is_open = False
        self.is_refused = False
        """We refused an accepted link: whatever else arrives on it is dropped until the peer hangs up."""
        self.refusal = ""
        """Why the peer refused a link that we opened, in its words."""
        self.is_over = False
        self.is_dirty = False
        """Something waits in the outbox, for the end of the tick."""
        self.outbox = Outbox()
        self._identity = identity
        self._accepted = isinstance(peer, bytes)
        if not self._accepted:
            self.outbox.add(_greeting(EnvelopeKind.HELLO, identity))

    def arrived(self, frame: bytes | bytearray | memoryview) -> list[Envelope]:
        """What the frame holds for the runtime. Raises LinkRefused or BadFrame when the link must end.

        Handshake envelopes count only at the front of a frame, which is where every sender of ours puts them.
        """
        envelopes = decode_frame(frame)
        if self.is_open and envelopes[0].kind not in _HANDSHAKE:
            return envelopes
        self._shake_hands(envelopes[0])
        return envelopes[1:]

    def refuse(self, reason: str) -> None:
        """Answer with REFUSED and nothing else; what waited for this peer is dropped."""
        self.outbox = Outbox()
        self.outbox.add(Envelope.handshake(EnvelopeKind.REFUSED, msgspec.msgpack.encode(reason)))
        self.is_open = False
        self.is_refused = True

    def _shake_hands(self, first: Envelope) -> None:
        if first.kind == EnvelopeKind.REFUSED and not self._accepted:
            self.refusal = _decoded(first, str)
            raise LinkRefused(f"refused: {self.refusal}")
        expected = EnvelopeKind.HELLO if self._accepted else EnvelopeKind.WELCOME
        if first.kind != expected or self.is_open:
            raise LinkRefused(f"a link begins with one {expected.name}, got an envelope of kind {first.kind}")
        greeting = _decoded(first, Greeting)
        ours = self._identity
        if greeting.protocol != PROTOCOL:
            raise LinkRefused(
                f"{greeting.name} speaks protocol {greeting.protocol}, {ours.name} speaks {PROTOCOL}; run one version of Rubato", "protocol"
            )
        if greeting.run_id != ours.run_id:
            raise LinkRefused(f"{greeting.name} belongs to run {greeting.run_id!r}, {ours.name} belongs to run {ours.run_id!r}", "run")
        if greeting.schema and ours.schema and greeting.schema != ours.schema:
            raise LinkRefused(
                f"{greeting.name} has other message types ({greeting.schema}) than {ours.name} ({ours.schema}): "
                "run one version of Rubato and of your own messages on every host",
                "schema",
            )
        self.peer_name = greeting.name
        self.is_open = True
        if self._accepted:
            self.outbox.add(_greeting(EnvelopeKind.WELCOME, ours))


def _greeting(kind: EnvelopeKind, identity: Identity) -> Envelope:
    return Envelope.handshake(kind, msgspec.msgpack.encode(Greeting(PROTOCOL, *identity)))


def _decoded(envelope: Envelope, wanted: type[BodyT]) -> BodyT:
    try:
        return msgspec.msgpack.decode(envelope.body, type=wanted)
    except (msgspec.MsgspecError, ValueError) as error:
        raise BadFrame(f"a handshake of kind {envelope.kind} is malformed: {error}") from None


# -- credit -----------------------------------------------------------------------------------------------------------

WINDOW_MESSAGES = 1024
WINDOW_BYTES = 4 * 1024 * 1024
"""Both sides start from these without a word on the wire. Large enough that a sender of small messages goes on while the receiver
works through the batch before, small enough that what 64 senders may have queued fits in memory: the bytes bound that."""

REGRANT_MESSAGES = WINDOW_MESSAGES // 4
REGRANT_BYTES = WINDOW_BYTES // 2


def charge(size_bytes: int) -> int:
    """Bytes a message costs: its size, but never more than half the window.

    The receiver may hold back almost half a window before it re-grants. A message that cost more than the other half could
    wait for ever; capped, at most two such giants are in flight.
    """
    return min(size_bytes, REGRANT_BYTES)


class Account:
    """Sender's side of one (link, actor): what may still be sent without hearing from the receiver."""

    __slots__ = ("messages", "size_bytes")

    def __init__(self) -> None:
        self.messages = WINDOW_MESSAGES
        self.size_bytes = WINDOW_BYTES

    def take(self, size_bytes: int) -> bool:
        """Pay for one message of `size_bytes`; False, and nothing is paid, when the credit does not reach."""
        cost = size_bytes if size_bytes < REGRANT_BYTES else REGRANT_BYTES
        if self.messages < 1 or self.size_bytes < cost:
            return False
        self.messages -= 1
        self.size_bytes -= cost
        return True

    def grant(self, messages: int, size_bytes: int) -> None:
        """The receiver grants more. Negative amounts, which no receiver of ours sends, count as nothing."""
        self.messages += max(0, messages)
        self.size_bytes += max(0, size_bytes)


class Grants:
    """Receiver's side of one (link, actor): gathers what was consumed until it is worth a message."""

    __slots__ = ("messages", "size_bytes")

    def __init__(self) -> None:
        self.messages = 0
        self.size_bytes = 0

    def consumed(self, size_bytes: int) -> tuple[int, int]:
        """One message left the queue. Returns (messages, bytes) to grant now, or (0, 0) while too little has gathered."""
        self.messages += 1
        self.size_bytes += size_bytes if size_bytes < REGRANT_BYTES else REGRANT_BYTES
        if self.messages < REGRANT_MESSAGES and self.size_bytes < REGRANT_BYTES:
            return 0, 0
        gathered = self.messages, self.size_bytes
        self.messages = self.size_bytes = 0
        return gathered
