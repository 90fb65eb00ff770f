"""What one link sends at the end of the tick: envelopes, encoded when posted, in as few frames as the limits allow.

Encoding at once puts an error where its cause is, and leaves no message that could change before it is sent. It goes straight into the
frame: to encode each envelope alone and join them later took twice as long.
"""

from collections.abc import Sequence

import msgspec

from bus.codec import MAX_ENVELOPES, check_buffers, check_piece, encode_envelope
from bus.envelope import Envelope
from bus.errors import BadFrame

_encode_into = msgspec.msgpack.Encoder().encode_into

FULL_BYTES = 256 * 1024
"""A frame is closed once it has this much: larger ones save nothing more and make the receiver's loop stutter."""

_EMPTY = b"\xdc\0\0"
"""The header of a MessagePack array with room for any count, so it can be written last."""

_END = -1


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
