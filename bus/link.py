"""One end of a link, without I/O: who may speak on it. HELLO is first; a peer of another run or protocol is refused, never guessed at.

The side that opened a link does not wait for WELCOME before it posts: a refusal costs it nothing but what it posted meanwhile.
"""

from typing import TypeVar

import msgspec

from bus.codec import decode_frame
from bus.envelope import Envelope, EnvelopeKind
from bus.errors import BadFrame, LinkRefused
from bus.outbox import Outbox
from bus.transport import Identity, Peer

PROTOCOL = 1
"""Changes when an old process could misread a new one's envelopes."""

BodyT = TypeVar("BodyT")

_HANDSHAKE = frozenset({EnvelopeKind.HELLO, EnvelopeKind.WELCOME, EnvelopeKind.REFUSED})


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
        self.outbox.add(_envelope(EnvelopeKind.REFUSED, msgspec.msgpack.encode(reason)))
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
    return _envelope(kind, msgspec.msgpack.encode(Greeting(PROTOCOL, *identity)))


def _envelope(kind: EnvelopeKind, body: bytes) -> Envelope:
    return Envelope(kind, 0, "", 0, "", 0, b"", "", 0, msgspec.Raw(body))


def _decoded(envelope: Envelope, wanted: type[BodyT]) -> BodyT:
    try:
        return msgspec.msgpack.decode(envelope.body, type=wanted)
    except (msgspec.MsgspecError, ValueError) as error:
        raise BadFrame(f"a handshake of kind {envelope.kind} is malformed: {error}") from None
