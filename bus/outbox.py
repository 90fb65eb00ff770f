"""What one link sends at the end of the tick: envelopes, encoded when posted, joined into as few frames as the limits allow.

Encoding at once puts an error where its cause is, and leaves no message that could change before it is sent.
"""

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from bus.codec import MAX_ENVELOPES, check_buffers, check_piece, encode_envelope, join_frame
from bus.envelope import Envelope

_encode = msgspec.msgpack.Encoder().encode

FULL_BYTES = 256 * 1024
"""A frame is closed once it has this much: larger ones save nothing more and make the receiver's loop stutter."""


class Frame(NamedTuple):
    """Envelopes that travel together; `buffers` belong to the last one, which is why it is the last."""

    data: bytes
    buffers: Sequence[memoryview | bytes]


class Outbox:
    """Not bounded by itself: what may wait here is what the receivers granted as credit."""

    __slots__ = ("_closed", "_pieces", "_size")

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        self._size = 0
        self._closed: list[Frame] = []

    def add(self, envelope: Envelope, buffers: Sequence[memoryview | bytes] = ()) -> int:
        """Append in order; how many envelopes wait for their frame to close. Raises BadFrame, leaving the outbox as it was, when the envelope exceeds a limit."""
        try:
            piece = _encode(envelope)
        except (TypeError, ValueError, OverflowError):
            piece = encode_envelope(envelope)  # which says what is wrong
        if len(piece) > FULL_BYTES:
            check_piece(envelope, piece)
        if buffers:
            check_buffers(buffers)
        if self._size + len(piece) > FULL_BYTES and self._pieces:
            self._close(())
        pieces = self._pieces
        pieces.append(piece)
        self._size += len(piece)
        if buffers or len(pieces) == MAX_ENVELOPES:
            self._close(buffers)
        return len(pieces)

    def take(self) -> list[Frame]:
        """Everything added so far, in order; the outbox is empty afterwards."""
        if self._pieces:
            self._close(())
        frames = self._closed
        self._closed = []
        return frames

    def _close(self, buffers: Sequence[memoryview | bytes]) -> None:
        self._closed.append(Frame(join_frame(self._pieces), buffers))
        self._pieces = []
        self._size = 0
