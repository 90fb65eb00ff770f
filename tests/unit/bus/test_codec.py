import msgspec
import pytest

from rubato.bus.codec import (
    ARRAY_BESIDE,
    BUFFER_BESIDE,
    CHUNK_BYTES,
    MAX_BUFFERS,
    MAX_ENVELOPES,
    OUT_OF_BAND_BYTES,
    WHOLE_BYTES,
    Envelope,
    EnvelopeKind,
    cut,
    decode_body,
    decode_frame,
    encode_body,
    join,
)
from rubato.bus.errors import BadFrame
from rubato.bus.link import FULL_BYTES, Outbox
from rubato.bus.message import Array, Buffer, Message


class Weights(Message, frozen=True):
    values: Array
    raw: Buffer


class Many(Message, frozen=True):
    blobs: tuple[Buffer, ...]


class Note(Message, frozen=True):
    text: str
    grown: int = 7


class OldNote(Message, frozen=True):
    text: str


BIG = bytes(OUT_OF_BAND_BYTES)


def envelope(number: int = 0, body: bytes = b"\xc0", **fields) -> Envelope:
    return Envelope(EnvelopeKind.TELL, number, fields.pop("target", "engine-1"), 1, "Note", 0, b"", msgspec.Raw(body))


def ext(code: int, payload: object) -> msgspec.msgpack.Ext:
    return msgspec.msgpack.Ext(code, msgspec.msgpack.encode(payload))


def test_small_values_travel_in_the_body_and_large_ones_beside_it():
    small = encode_body(Weights(Array("uint8", (3,), b"abc"), Buffer(BIG[:-1])))
    large = encode_body(Weights(Array("uint8", (len(BIG),), BIG), Buffer(BIG)))

    assert small[2] == []
    assert [len(buffer) for buffer in large[2]] == [len(BIG), len(BIG)]
    assert len(bytes(large[1])) < 100


def test_a_decoded_array_is_a_view_of_the_received_buffer():
    _, body, _ = encode_body(Weights(Array("uint8", (len(BIG),), BIG), Buffer(BIG)))
    received = [bytearray(BIG), bytearray(BIG)]

    weights = decode_body(Weights, body, [memoryview(buffer) for buffer in received])
    received[0][5] = 77

    assert weights.values.data[5] == 77
    assert weights.values.data.readonly


def test_the_same_array_twice_in_a_message_travels_twice():
    blob = Buffer(BIG)

    _, body, buffers = encode_body(Many((blob, blob)))

    assert decode_body(Many, body, buffers) == Many((blob, blob))


def test_a_field_appended_with_a_default_reads_old_messages_and_old_code_reads_new_ones():
    _, old, _ = encode_body(OldNote("hi"))
    _, new, _ = encode_body(Note("hi", 3))

    assert decode_body(Note, old) == Note("hi", 7)
    assert decode_body(OldNote, new) == OldNote("hi")


@pytest.mark.parametrize(
    "fields",
    [
        [ext(ARRAY_BESIDE, ["uint8", [len(BIG)], 1]), Buffer(b"")],
        [ext(ARRAY_BESIDE, ["uint8", [len(BIG)], -1]), Buffer(b"")],
        [ext(ARRAY_BESIDE, ["uint8", [len(BIG) + 1], 0]), Buffer(b"")],
        [ext(ARRAY_BESIDE, ["object", [len(BIG)], 0]), Buffer(b"")],
        [ext(ARRAY_BESIDE, ["uint8", [2**62, 4], 0]), Buffer(b"")],
        [ext(ARRAY_BESIDE, ["uint8", [len(BIG)], 0]), ext(BUFFER_BESIDE, [0, len(BIG)])],
        [ext(ARRAY_BESIDE, ["uint8", [len(BIG)], 0]), 5],
        [ext(9, []), ext(BUFFER_BESIDE, [0, len(BIG)])],
        [Array("uint8", (1,), b"a"), ext(BUFFER_BESIDE, [0, 3])],
        [Array("uint8", (1,), b"a"), Buffer(b"")],
        [Buffer(b"a"), ext(BUFFER_BESIDE, [0, len(BIG)])],
    ],
    ids=[
        "missing index",
        "negative index",
        "shape too large",
        "dtype",
        "shape that overflows",
        "named twice",
        "not an extension",
        "unknown extension",
        "wrong size",
        "buffer not named",
        "wrong value type",
    ],
)
def test_a_body_whose_extensions_do_not_match_its_buffers_is_refused(fields):
    def hook(value):
        if isinstance(value, Buffer):
            return msgspec.msgpack.Ext(3, value.data)
        return ext(1, [value.dtype, value.shape, bytes(value.data)])

    body = msgspec.msgpack.Encoder(enc_hook=hook).encode(fields)

    with pytest.raises(BadFrame, match="not a Weights"):
        decode_body(Weights, body, [memoryview(BIG)])


def test_a_deeply_nested_body_is_refused():
    with pytest.raises(BadFrame):
        decode_body(Note, b"\x91" * 100_000)


def test_a_body_or_a_field_that_cannot_travel_is_refused_where_it_is_made():
    with pytest.raises(TypeError, match="a complex cannot travel"):
        encode_body(Note(1j))  # type: ignore[arg-type]
    with pytest.raises(BadFrame, match="Buffer or an Array"):
        encode_body(Note("x" * (33 * 1024 * 1024)))
    with pytest.raises(BadFrame, match="257 buffers"):
        encode_body(Many((Buffer(BIG),) * (MAX_BUFFERS + 1)))
    with pytest.raises(BadFrame, match="cannot be encoded"):
        Outbox().add(envelope(2**70))


def test_a_frame_holds_at_most_512_envelopes():
    outbox = Outbox()
    for number in range(MAX_ENVELOPES + 1):
        outbox.add(envelope(number))

    full, rest = (bytes(frame.data) for frame in outbox.take())

    assert (len(decode_frame(full)), len(decode_frame(rest))) == (MAX_ENVELOPES, 1)
    with pytest.raises(BadFrame, match="1 to 512"):
        decode_frame(b"\xdc" + (MAX_ENVELOPES + 1).to_bytes(2, "big") + full[3:] + rest[3:])


@pytest.mark.parametrize("frame", [b"", b"\x90", b"\xdc\0\0", b"\xdd\0\0\0\1", b"\x80\0\0", b"\xc0\xc0\xc0"])
def test_what_is_not_a_short_array_is_refused_before_it_is_decoded(frame):
    with pytest.raises(BadFrame):
        decode_frame(frame)


def test_a_frame_as_other_libraries_write_it_is_read():
    frame = msgspec.msgpack.encode([envelope(1), envelope(2)])

    assert [e.id for e in decode_frame(frame)] == [1, 2]


def test_an_outbox_closes_frames_at_512_envelopes_at_256_kib_and_at_buffers():
    outbox = Outbox()
    for number in range(600):
        outbox.add(envelope(number))
    outbox.add(envelope(600), [b"x"])
    for number in range(601, 604):
        outbox.add(envelope(number, msgspec.msgpack.encode(bytes(FULL_BYTES // 2))))

    frames = outbox.take()

    counts = [len(decode_frame(frame.data)) for frame in frames]
    assert counts == [512, 89, 1, 1, 1]
    assert [list(frame.buffers) for frame in frames] == [[], [b"x"], [], [], []]
    assert [e.id for frame in frames for e in decode_frame(frame.data)] == list(range(604))
    assert outbox.take() == []


def test_an_envelope_that_cannot_travel_leaves_the_outbox_as_it_was():
    outbox = Outbox()
    outbox.add(envelope(1))

    with pytest.raises(BadFrame):
        outbox.add(envelope(2, target="\ud800"))
    with pytest.raises(BadFrame):
        outbox.add(envelope(3), [b""] * (MAX_BUFFERS + 1))

    (frame,) = outbox.take()
    assert [e.id for e in decode_frame(frame.data)] == [1]


def test_only_buffers_above_16_mib_are_cut_up():
    whole, large = bytes(WHOLE_BYTES), bytes(WHOLE_BYTES + 1)

    parts = list(cut([whole, large, b""]))

    assert parts[1] is whole
    assert [len(part) for part in parts[2:]] == [CHUNK_BYTES] * 4 + [1, 0]
    assert [len(buffer) for buffer in join([memoryview(part) for part in parts])] == [len(whole), len(large), 0]


@pytest.mark.parametrize(
    "parts",
    [
        [b"\x91"],
        [b"\x91\x05"],
        [b"\x91\x05", b"1234"],
        [b"\x91\x05", b"123456"],
        [b"\x91\x05", b"12345", b"6"],
        [b"\x90", b"1"],
        [b"\x91\x00"],
        [b"\x91\xff", b""],
        [b"\x91\xcf" + b"\xff" * 8, b"1"],
        [b"\xdd\xff\xff\xff\xff", b"1"],
    ],
)
def test_parts_that_do_not_match_their_table_are_refused(parts):
    with pytest.raises(BadFrame):
        join([memoryview(part) for part in parts])


def test_no_parts_are_no_buffers():
    assert join([]) == []
