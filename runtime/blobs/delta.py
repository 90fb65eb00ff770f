"""What changed between two images of one size, in words of two bytes: pure, lossless, a piece at a time.

Of a piece that changed in n words: how far each is from the one before, less one, in bytes of which 255 says "and more"; then by how
much each grew, modulo 2^16 and zigzag, low bytes before high ones; all by zlib. Where few words change, and those by little, as in
weights in bfloat16 from one update to the next, that is some hundredths of the piece.
"""

import zlib

import numpy as np
from numpy.typing import NDArray

MORE = 255
"""A distance of `MORE` words or more goes on in the next byte."""

NUM_BYTES = 4
"""In front of what is compressed: in how many words the piece changed, little-endian."""


def num_changed(old: memoryview, new: memoryview) -> int:
    """In how many words `new` differs from `old`, which is as long."""
    return int(np.count_nonzero(_words(old) != _words(new)))


def changes(old: memoryview, new: memoryview) -> bytes:
    """What makes `new` of `old`, which is as long. An odd last byte counts as a word."""
    before, after = _words(old), _words(new)
    at = np.flatnonzero(before != after)
    distances = np.diff(at, prepend=-1) - 1
    steps = np.full(len(at) + int((distances // MORE).sum()), MORE, np.uint8)
    steps[np.cumsum(distances // MORE + 1) - 1] = distances % MORE
    grown = (after[at] - before[at]).view(np.int16)
    zigzag = ((grown << 1) ^ (grown >> 15)).view(np.uint16)
    planes = (steps.tobytes(), zigzag.astype(np.uint8).tobytes(), (zigzag >> 8).astype(np.uint8).tobytes())
    return len(at).to_bytes(NUM_BYTES, "little") + zlib.compress(b"".join(planes), level=1)


def apply(found: memoryview | bytes, memory: memoryview) -> None:
    """Make `memory`, which holds the old piece, hold the new one. Raises ValueError for what are no changes of such a piece."""
    words = _words(memory)
    num = int.from_bytes(found[:NUM_BYTES], "little")
    try:
        most = len(words) // MORE + 3 * min(num, len(words)) + 1
        planes = np.frombuffer(zlib.decompressobj().decompress(found[NUM_BYTES:], most), np.uint8)
    except zlib.error as error:
        raise ValueError(f"these are no changes of a blob: {error}") from None
    steps, low, high = planes[: -2 * num or None], planes[len(planes) - 2 * num :][:num], planes[len(planes) - num :]
    at = np.cumsum(steps, dtype=np.int64)[steps != MORE]
    if len(at) != num or len(high) != num or (num and at[-1] + num > len(words)):
        raise ValueError(f"these are no changes of a piece of {memory.nbytes} bytes")
    zigzag = low.astype(np.uint16) | high.astype(np.uint16) << 8
    words[at + np.arange(num)] += (zigzag >> 1) ^ -(zigzag & 1)
    if memory.nbytes % 2:
        memory[:] = words.tobytes()[: memory.nbytes]


def _words(view: memoryview) -> NDArray[np.uint16]:
    """Not a copy, where it is whole words."""
    return np.frombuffer(view if view.nbytes % 2 == 0 else bytearray(view) + b"\0", np.dtype("<u2"))
