"""The header every message travels under; the body stays raw until the target's typed decoder runs."""

from enum import IntEnum

import msgspec


class EnvelopeKind(IntEnum):
    """What an envelope is; every ask ends with one of OK … DRAINING, or with its deadline."""

    ASK = 1
    TELL = 2
    OK = 3
    ERROR = 4
    """The handler raised; the body is the error text."""
    EXPIRED = 5
    """The deadline passed before the handler started."""
    WRONG_INCARNATION = 6
    NO_ACTOR = 7
    OVERLOADED = 8
    DRAINING = 9
    BAD_BODY = 10
    CANCEL = 11
    """Cancels the ask with the same id, queued or running."""
    CREDIT = 12
    """Grants `credit` messages and, in `id`, that many bytes to the actor named in `target`."""
    HELLO = 13
    """First on every link; the body is the sender's Identity."""
    WELCOME = 14
    REFUSED = 15
    GOODBYE = 16


class Envelope(msgspec.Struct, array_like=True, gc=False):
    """One message in flight. Positional on the wire: readable by any MessagePack library as an eleven-element array."""

    kind: int
    id: int
    """Matches a reply to its ask; unique per sending process."""
    target: str
    """Actor name; on a reply, the actor that answers."""
    incarnation: int
    """The incarnation of `target` that the sender means; 0 accepts any."""
    tag: str
    """Class name of the message in `body`."""
    budget_us: int
    """Remaining time in µs when posted; 0 means no deadline. No clock is shared between processes."""
    trace: bytes
    key: str
    """Idempotency key; empty for none."""
    credit: int
    """Messages granted back to the peer for `target`, piggybacked on replies."""
    body: msgspec.Raw
    sender: str = ""
    """Name of the sending actor; empty on replies."""
