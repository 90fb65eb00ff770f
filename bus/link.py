"""One link, without I/O: who may speak on it, what waits to leave on it, and who was turned away.

HELLO is first; a peer of another run or protocol is refused, never guessed at. The side that opened a link does not wait for WELCOME
before it posts: a refusal costs it nothing but what it posted meanwhile.
"""

from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import msgspec

from bus.codec import MAX_ENVELOPES, Envelope, EnvelopeKind, check_buffers, check_piece, decode_frame, encode_envelope
from bus.errors import BadFrame, LinkRefused

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
        except (TypeError, ValueError, OverflowError):
            del data[before:]
            encode_envelope(envelope)  # which says what is wrong
            raise
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
            check_piece(envelope, len(data) - before)
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


class Link:
    """State of one end. `accepted` ends were opened by the peer; the others by us."""

    __slots__ = ("_accepted", "_identity", "is_open", "is_refused", "outbox", "peer", "peer_name")

    def __init__(self, peer: Peer, identity: Identity, *, accepted: bool) -> None:
        self.peer = peer
        self.peer_name = ""
        """The peer's actor, once it has greeted us."""
        self.is_open = False
        self.is_refused = False
        """We refused an accepted link: whatever else arrives on it is dropped until the peer hangs up."""
        self.outbox = Outbox()
        self._identity = identity
        self._accepted = accepted
        if not accepted:
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
            raise LinkRefused(f"refused: {_decoded(first, str)}")
        expected = EnvelopeKind.HELLO if self._accepted else EnvelopeKind.WELCOME
        if first.kind != expected or self.is_open:
            raise LinkRefused(f"a link begins with one {expected.name}, got an envelope of kind {first.kind}")
        greeting = _decoded(first, Greeting)
        ours = self._identity
        if greeting.protocol != PROTOCOL:
            raise LinkRefused(
                f"{greeting.name} speaks protocol {greeting.protocol}, {ours.name} speaks {PROTOCOL}; run one version of Rubato",
                "protocol",
            )
        if greeting.run_id != ours.run_id:
            raise LinkRefused(
                f"{greeting.name} belongs to run {greeting.run_id!r}, {ours.name} belongs to run {ours.run_id!r}", "run"
            )
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
