"""The wire format: an envelope around each message, frames of envelopes, the buffers beside them, and bodies turned into bytes and back.

Whatever arrives is checked against its type before it exists, and fails only as BadFrame. An envelope's body stays raw until the
target's typed decoder runs.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from enum import IntEnum
from typing import Annotated, Any, TypeVar

import msgspec

from rubato.bus.errors import BadFrame
from rubato.bus.message import MAX_DIMENSIONS, Array, Buffer, Message, tag_of

MessageT = TypeVar("MessageT", bound=Message)


class EnvelopeKind(IntEnum):
    """What an envelope is; every ask ends with one of OK … BAD_BODY, or with its deadline."""

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
    BAD_BODY = 10
    CANCEL = 11
    """Cancels the ask with the same id, queued or running."""
    CREDIT = 12
    """The actor named in `target` grants so many messages and bytes more: its body."""
    HELLO = 13
    """First on every link; the body is the sender's Greeting."""
    WELCOME = 14
    REFUSED = 15


_ASK = int(EnvelopeKind.ASK)
_TELL = int(EnvelopeKind.TELL)
_CANCEL = int(EnvelopeKind.CANCEL)
_CREDIT = int(EnvelopeKind.CREDIT)
# To look a member of EnvelopeKind up costs as much as to decode an envelope.

NOTHING = msgspec.Raw(msgspec.msgpack.encode(None))
"""The body of an envelope that needs none."""


_decode_grant = msgspec.msgpack.Decoder(tuple[int, int]).decode


class Envelope(msgspec.Struct, array_like=True, gc=False):
    """One message in flight. Positional on the wire: readable by any MessagePack library as a nine-element array.

    Made by the constructors below, one for each use; a field that a use does not need is 0 or empty.
    """

    kind: int
    id: int
    """Of an ask: unique on the link; its reply and its CANCEL repeat it."""
    target: str
    """Name of the actor that is meant; on what an actor sends back, its own."""
    incarnation: int
    """The incarnation of `target`; 0 accepts any."""
    tag: str
    """Class name of the message in `body`."""
    budget_us: int
    """Of an ask: remaining time in µs when posted; 0 means no deadline. No clock is shared between processes."""
    trace: bytes
    body: msgspec.Raw
    sender: str = ""
    """Name of the sending actor; empty on replies."""

    @classmethod
    def ask(
        cls, ask_id: int, target: str, incarnation: int, tag: str, budget_us: int, trace: bytes, body: msgspec.Raw, sender: str
    ) -> "Envelope":
        """A request that wants one reply."""
        return cls(_ASK, ask_id, target, incarnation, tag, budget_us, trace, body, sender)

    @classmethod
    def tell(cls, target: str, incarnation: int, tag: str, trace: bytes, body: msgspec.Raw, sender: str) -> "Envelope":
        """A message without an answer."""
        return cls(_TELL, 0, target, incarnation, tag, 0, trace, body, sender)

    @classmethod
    def cancel(cls, ask_id: int, target: str, incarnation: int, sender: str) -> "Envelope":
        """The sender of the request `ask_id` waits no more."""
        return cls(_CANCEL, ask_id, target, incarnation, "", 0, b"", NOTHING, sender)

    @classmethod
    def grant(cls, target: str, messages: int, size_bytes: int) -> "Envelope":
        """`target` takes so much more from this link."""
        return cls(_CREDIT, 0, target, 0, "", 0, b"", msgspec.Raw(msgspec.msgpack.encode((messages, size_bytes))))

    @classmethod
    def handshake(cls, kind: EnvelopeKind, body: bytes) -> "Envelope":
        """HELLO, WELCOME or REFUSED."""
        return cls(kind, 0, "", 0, "", 0, b"", msgspec.Raw(body))

    def reply(self, kind: int, incarnation: int, tag: str = "", body: msgspec.Raw = NOTHING) -> "Envelope":
        """The answer to this ask by incarnation `incarnation` of its target."""
        return Envelope(kind, self.id, self.target, incarnation, tag, 0, self.trace, body)

    def granted(self) -> tuple[int, int]:
        """The messages and bytes that a CREDIT grants; nothing where its body is malformed."""
        try:
            return _decode_grant(self.body)
        except (msgspec.MsgspecError, ValueError):
            return 0, 0


# -- frames and bodies -------------------------------------------------------------------------------------------------

MAX_ENVELOPES = 512
"""Per frame: beyond it coalescing saves nothing more, and a frame is decoded in one go on the event loop."""

MAX_FRAME_BYTES = 64 * 1024 * 1024
MAX_BODY_BYTES = MAX_FRAME_BYTES // 2
"""So that the header always fits."""

MAX_BUFFERS = 256
MAX_BUFFERS_BYTES = 1024 * 1024 * 1024
"""All buffers of one message together; weights, which are larger, are blobs and never messages."""

OUT_OF_BAND_BYTES = 64 * 1024
"""From here on a second frame and its bookkeeping cost less than two copies; below, copying is cheaper."""

ARRAY_INLINE, ARRAY_BESIDE, BUFFER_INLINE, BUFFER_BESIDE = 1, 2, 3, 4
"""MessagePack extension codes. Inline ones carry the bytes; the others carry the index of a buffer that travels beside."""

_Size = Annotated[int, msgspec.Meta(ge=0, le=2**48)]
_Shape = Annotated[tuple[_Size, ...], msgspec.Meta(max_length=MAX_DIMENSIONS)]

NOT_OURS = (msgspec.MsgspecError, ValueError, OverflowError, RecursionError)
"""All that msgspec raises for bytes that are malformed, of another type, or nested beyond reason (UnicodeDecodeError is a ValueError)."""

_encode = msgspec.msgpack.Encoder().encode
_Raw = msgspec.Raw
_decode_frame = msgspec.msgpack.Decoder(list[Envelope]).decode
_decode_array_inline = msgspec.msgpack.Decoder(tuple[str, _Shape, bytes]).decode
_decode_array_beside = msgspec.msgpack.Decoder(tuple[str, _Shape, int]).decode
_decode_buffer_beside = msgspec.msgpack.Decoder(tuple[int, int]).decode


def encode_body(message: Message) -> tuple[str, msgspec.Raw, Sequence[memoryview]]:
    """The message's tag, its body, and the buffers that travel beside the body, in the order their indices name.

    Raises BadFrame when it exceeds the limits of a frame, TypeError when a field's value cannot travel at all.
    """
    try:
        body = _encode(message)
    except TypeError:
        return _encode_with_buffers(message)
    if len(body) > MAX_BODY_BYTES:
        raise _too_large(message, body)
    return type(message).__name__, _Raw(body), ()


def _encode_with_buffers(message: Message) -> tuple[str, msgspec.Raw, list[memoryview]]:
    """The same for a message that holds an Array or a Buffer, which the plain encoder does not know."""
    buffers: list[memoryview] = []

    def beside(value: Any) -> msgspec.msgpack.Ext:
        return _to_ext(value, buffers)

    # An encoder costs 0.2 µs to make and so belongs to this call alone: no state to share between threads.
    body = msgspec.msgpack.Encoder(enc_hook=beside).encode(message)
    if len(body) > MAX_BODY_BYTES:
        raise _too_large(message, body)
    check_buffers(buffers)
    return tag_of(type(message)), msgspec.Raw(body), buffers


def _too_large(message: Message, body: bytes) -> BadFrame:
    return BadFrame(f"{tag_of(type(message))} takes {len(body)} bytes; make its large fields a Buffer or an Array")


def decode_body(message: type[MessageT], body: msgspec.Raw | bytes, buffers: Sequence[memoryview] = ()) -> MessageT:
    """Decode `body` as exactly `message`; its arrays are read-only views of `buffers`. Raises BadFrame.

    A buffer that the body does not name, or names twice, is refused as well.
    """
    try:
        if not buffers:
            return body_decoder(message)(body)
        return _decode_with_buffers(message, body, buffers)
    except NOT_OURS as error:
        raise BadFrame(f"not a {tag_of(message)}: {error}") from None


def decode_frame(frame: bytes | bytearray | memoryview) -> list[Envelope]:
    """The envelopes of a frame, one at least; bodies stay raw and keep the frame's memory alive. Raises BadFrame."""
    size = len(frame)
    if not 3 <= size <= MAX_FRAME_BYTES:
        raise BadFrame(f"a frame of {size} bytes; between 3 and {MAX_FRAME_BYTES} are allowed")
    # Other MessagePack libraries write the shortest header that fits: up to fifteen elements in one byte.
    first = frame[0]
    count = frame[1] << 8 | frame[2] if first == 0xDC else first & 0x0F if first & 0xF0 == 0x90 else 0
    if not 1 <= count <= MAX_ENVELOPES:
        raise BadFrame(f"a frame must be an array of 1 to {MAX_ENVELOPES} envelopes")
    try:
        return _decode_frame(frame)
    except NOT_OURS as error:
        raise BadFrame(f"not a frame of envelopes: {error}") from None


def check_buffers(buffers: Sequence[memoryview | bytes]) -> None:
    """Raise BadFrame when one message has too many buffers, or too many bytes in them."""
    if len(buffers) > MAX_BUFFERS:
        raise BadFrame(f"{len(buffers)} buffers on one message; at most {MAX_BUFFERS} travel")
    size = sum(map(len, buffers))
    if size > MAX_BUFFERS_BYTES:
        raise BadFrame(f"{size} bytes beside one message; at most {MAX_BUFFERS_BYTES} travel, use a blob")


@functools.cache
def body_decoder(message: type[MessageT]) -> Callable[[msgspec.Raw | bytes], MessageT]:
    """Decoder of a body that has no buffers beside it. Raises any of NOT_OURS: the caller makes that a BadFrame."""

    def extension(code: int, data: memoryview) -> Any:
        return _from_ext(code, data, (), set())

    return msgspec.msgpack.Decoder(message, ext_hook=extension).decode


def _decode_with_buffers(message: type[MessageT], body: msgspec.Raw | bytes, buffers: Sequence[memoryview]) -> MessageT:
    used: set[int] = set()

    def extension(code: int, data: memoryview) -> Any:
        return _from_ext(code, data, buffers, used)

    decoded = msgspec.msgpack.Decoder(message, ext_hook=extension).decode(body)
    if len(used) != len(buffers):
        raise ValueError(f"names {len(used)} of its {len(buffers)} buffers")
    return decoded


def _to_ext(value: Any, buffers: list[memoryview]) -> msgspec.msgpack.Ext:
    if isinstance(value, Array):
        if len(value.data) < OUT_OF_BAND_BYTES:
            return msgspec.msgpack.Ext(ARRAY_INLINE, _encode((value.dtype, value.shape, bytes(value.data))))
        buffers.append(value.data)
        return msgspec.msgpack.Ext(ARRAY_BESIDE, _encode((value.dtype, value.shape, len(buffers) - 1)))
    if isinstance(value, Buffer):
        if len(value.data) < OUT_OF_BAND_BYTES:
            return msgspec.msgpack.Ext(BUFFER_INLINE, value.data)
        buffers.append(value.data)
        return msgspec.msgpack.Ext(BUFFER_BESIDE, _encode((len(buffers) - 1, len(value.data))))
    raise TypeError(f"a {type(value).__name__} cannot travel in a message")


def _from_ext(code: int, data: memoryview, buffers: Sequence[memoryview], used: set[int]) -> Array | Buffer:
    try:
        if code == ARRAY_INLINE:
            return Array(*_decode_array_inline(data))
        if code == BUFFER_INLINE:
            return Buffer(bytes(data))
        if code == ARRAY_BESIDE:
            dtype, shape, index = _decode_array_beside(data)
            return Array(dtype, shape, _claim(index, buffers, used))
        if code == BUFFER_BESIDE:
            index, size_bytes = _decode_buffer_beside(data)
            memory = _claim(index, buffers, used)
            if len(memory) != size_bytes:
                raise ValueError(f"buffer {index} has {len(memory)} bytes, not {size_bytes}")
            return Buffer(memory)
    except BadFrame as error:
        raise ValueError(str(error)) from None
    raise ValueError(f"extension code {code} is not ours")


def _claim(index: int, buffers: Sequence[memoryview], used: set[int]) -> memoryview:
    if not 0 <= index < len(buffers) or index in used:
        raise ValueError(f"buffer {index} is missing or named twice")
    used.add(index)
    return buffers[index]


# -- buffers as the parts of one ZeroMQ message --------------------------------------------------------------------------

WHOLE_BYTES = 16 * 1024 * 1024
"""A part of this size moves without a copy on either side. Far larger ones fall off a cliff: their memory is mapped, faulted in and
unmapped anew for each message, which costs more than cutting them up and copying them together once."""
CHUNK_BYTES = 4 * 1024 * 1024
MAX_PARTS = 1 + MAX_BUFFERS + MAX_BUFFERS_BYTES // CHUNK_BYTES
"""Parts of one message beside its frame: the table, and at most this many pieces."""

_decode_table = msgspec.msgpack.Decoder(list[int]).decode


def cut(buffers: Sequence[memoryview | bytes]) -> Iterator[memoryview | bytes]:
    """The parts that follow a frame: the sizes of its buffers as a MessagePack array, then the buffers in order."""
    yield msgspec.msgpack.encode([len(buffer) for buffer in buffers])
    for buffer in buffers:
        size = len(buffer)
        if size <= WHOLE_BYTES:
            yield buffer
        else:
            view = memoryview(buffer)
            yield from (view[start : start + CHUNK_BYTES] for start in range(0, size, CHUNK_BYTES))


def join(parts: Sequence[memoryview]) -> list[memoryview]:
    """The buffers again, read-only. Allocates only what has already arrived. Raises BadFrame when parts and table disagree."""
    if not parts:
        return []
    try:
        sizes = _decode_table(parts[0])
    except (msgspec.MsgspecError, ValueError) as error:
        raise BadFrame(f"the table of buffer sizes is malformed: {error}") from None
    pieces = iter(parts[1:])
    buffers = [_gather(size, pieces) for size in sizes]
    if next(pieces, None) is not None:
        raise BadFrame("more buffers arrived than the table names")
    return buffers


def _gather(size: int, pieces: Iterator[memoryview]) -> memoryview:
    """Take pieces until they fill `size` exactly; every buffer has one piece at least."""
    taken: list[memoryview] = []
    have = 0
    while not taken or have < size:
        piece = next(pieces, None)
        if piece is None:
            raise BadFrame(f"a buffer of {size} bytes ended after {have}")
        taken.append(piece)
        have += len(piece)
    if have != size:
        raise BadFrame(f"a buffer of {size} bytes arrived with {have}")
    return (taken[0] if len(taken) == 1 else memoryview(b"".join(taken))).toreadonly()
