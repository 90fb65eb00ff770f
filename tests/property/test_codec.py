"""Whatever bytes arrive, the codec returns what was sent or raises BadFrame, and no other error."""

import contextlib
import math
from typing import Any

import msgpack
import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from rubato.bus.codec import OUT_OF_BAND_BYTES, Envelope, EnvelopeKind, cut, decode_body, decode_frame, encode_body, join
from rubato.bus.errors import BadFrame
from rubato.bus.message import ITEM_BYTES, Array, Buffer, Message


class Inner(msgspec.Struct, array_like=True, frozen=True):
    name: str
    span: tuple[int, int]


class Everything(Message, frozen=True):
    """One field of each kind that messages have."""

    number: int
    ratio: float
    text: str
    data: bytes
    items: tuple[Inner, ...]
    table: dict[str, int]
    maybe: str | None
    weights: Array
    blob: Buffer
    more: tuple[Array | None, ...] = ()


shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)


@st.composite
def arrays(draw) -> Array:
    dtype, shape = draw(st.sampled_from(sorted(ITEM_BYTES))), draw(shapes)
    if draw(st.booleans()):
        shape = (OUT_OF_BAND_BYTES + draw(st.integers(-1, 1)),)
    size = math.prod(shape) * ITEM_BYTES[dtype]
    pattern = draw(st.binary(min_size=8, max_size=8))
    return Array(dtype, shape, (pattern * (size // 8 + 1))[:size])


sizes = st.one_of(st.integers(0, 100), st.integers(OUT_OF_BAND_BYTES - 2, OUT_OF_BAND_BYTES + 2))
buffers = st.builds(lambda size, byte: Buffer(bytes([byte]) * size), sizes, st.integers(0, 255))
text = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
int64 = st.integers(-(2**63), 2**63 - 1)
messages = st.builds(
    Everything,
    number=int64,
    ratio=st.floats(allow_nan=False),
    text=text,
    data=st.binary(max_size=100),
    items=st.lists(st.builds(Inner, text, st.tuples(int64, int64)), max_size=3).map(tuple),
    table=st.dictionaries(text, int64, max_size=3),
    maybe=st.none() | text,
    weights=arrays(),
    blob=buffers,
    more=st.lists(st.none() | arrays(), max_size=3).map(tuple),
)
envelopes = st.builds(
    Envelope,
    kind=st.sampled_from(EnvelopeKind).map(int),
    id=st.integers(0, 2**63),
    target=text,
    incarnation=st.integers(0, 2**40),
    tag=text,
    budget_us=st.integers(0, 2**40),
    trace=st.binary(max_size=25),
    body=messages.map(lambda message: encode_body(message)[1]),
    sender=text,
)


def frame_of(posted: list[Envelope]) -> bytes:
    return b"".join((b"\xdc", len(posted).to_bytes(2, "big"), *map(msgspec.msgpack.encode, posted)))


@given(messages)
@settings(max_examples=200, deadline=None)
def test_a_message_decodes_to_what_was_encoded(message):
    tag, body, beside = encode_body(message)

    decoded = decode_body(Everything, body, [memoryview(bytes(buffer)) for buffer in beside])

    assert tag == "Everything"
    assert decoded == message
    assert all(len(buffer) >= OUT_OF_BAND_BYTES for buffer in beside)


@given(st.lists(envelopes, min_size=1, max_size=20))
@settings(max_examples=100, deadline=None)
def test_a_frame_decodes_to_the_envelopes_it_was_joined_from(posted):
    frame = frame_of(posted)

    decoded = decode_frame(frame)

    assert [plain(envelope) for envelope in decoded] == [plain(envelope) for envelope in posted]


@given(st.lists(envelopes, min_size=1, max_size=20))
@settings(max_examples=50, deadline=None)
def test_every_frame_is_readable_by_plain_msgpack_without_our_schema(posted):
    frame = frame_of(posted)

    rows = msgpack.unpackb(frame, strict_map_key=False)

    assert [len(row) for row in rows] == [9] * len(posted)
    assert [row[:7] for row in rows] == [list(plain(envelope))[:7] for envelope in posted]
    assert [len(row[7]) for row in rows] == [len(Everything.__struct_fields__)] * len(posted)


@given(st.lists(envelopes, min_size=1, max_size=14))
@settings(max_examples=50, deadline=None)
def test_frames_written_by_plain_msgpack_are_read(posted):
    frame = frame_of(posted)

    rewritten = msgpack.packb(msgpack.unpackb(frame, strict_map_key=False))

    assert [e.target for e in decode_frame(rewritten)] == [e.target for e in posted]


@st.composite
def mutations(draw, original: bytes) -> bytes:
    data = bytearray(original)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, max(0, len(data) - 1)))
        match draw(st.sampled_from(["flip", "cut", "insert", "drop", "huge"])):
            case "flip" if data:
                data[at] = draw(st.integers(0, 255))
            case "cut":
                del data[at:]
            case "insert":
                data[at:at] = draw(st.binary(max_size=5))
            case "drop":
                del data[at : at + draw(st.integers(1, 5))]
            case _:
                # Headers of arrays, maps, strings, binaries and extensions that claim four gigabytes.
                data[at:at] = bytes([draw(st.sampled_from([0xDD, 0xDF, 0xDB, 0xC6, 0xC9]))]) + b"\xff" * 4
    return bytes(data)


@given(st.data(), st.lists(envelopes, min_size=1, max_size=3))
@settings(max_examples=400, deadline=None)
def test_a_mutated_frame_never_raises_anything_but_bad_frame(data, posted):
    frame = frame_of(posted)
    mutated = data.draw(mutations(frame))

    with contextlib.suppress(BadFrame):
        for envelope in decode_frame(mutated):
            decode_body(Everything, envelope.body)


@given(st.data(), messages)
@settings(max_examples=400, deadline=None)
def test_a_mutated_body_never_raises_anything_but_bad_frame(data, message):
    _, body, beside = encode_body(message)
    mutated = data.draw(mutations(bytes(body)))
    received = [memoryview(buffer) for buffer in beside][: data.draw(st.integers(0, len(beside)))]

    with contextlib.suppress(BadFrame):
        decode_body(Everything, mutated, received)


@given(st.binary(max_size=200), st.lists(st.binary(max_size=20), max_size=3))
@settings(max_examples=400, deadline=None)
def test_noise_never_raises_anything_but_bad_frame(noise, beside):
    with contextlib.suppress(BadFrame):
        decode_frame(noise)
    with contextlib.suppress(BadFrame):
        decode_body(Everything, noise, [memoryview(part) for part in beside])
    with contextlib.suppress(BadFrame):
        join([memoryview(part) for part in (noise, *beside)])


@given(st.lists(st.binary(max_size=50), min_size=1, max_size=10))
def test_cut_buffers_join_to_themselves(parts):
    received = [memoryview(bytes(part)) for part in cut(parts)]

    assert [bytes(buffer) for buffer in join(received)] == parts


def plain(envelope: Envelope) -> tuple[Any, ...]:
    return (*msgspec.structs.astuple(envelope)[:9], bytes(envelope.body), envelope.sender)
