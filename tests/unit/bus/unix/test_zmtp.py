import pytest

from rubato.bus.codec import MAX_FRAME_BYTES
from rubato.bus.errors import BadFrame
from rubato.bus.unix.zmtp import GATHERED_BYTES, GREETING, MAX_COMMAND_BYTES, PING, Reader, header, ready


class Ear:
    """A reader and what it heard and answered."""

    def __init__(self, said: bytes = b"") -> None:
        self.heard: list[list[bytes]] = []
        self.answered: list[bytes] = []
        self.reader = Reader(lambda first, beside: self.heard.append([bytes(first), *map(bytes, beside)]), self.answered.append)
        if said:
            self.reader.feed(said)


def message(*parts: bytes) -> bytes:
    return b"".join(header(len(part), more=n + 1 < len(parts)) + part for n, part in enumerate(parts))


BEGIN = GREETING + ready(b"DEALER")
MESSAGES = [[b"small"], [b""], [b"x" * 255], [b"y" * 256], [b"first", b"", b"z" * (GATHERED_BYTES + 1)], [b"q" * 100_000]]


def test_the_greeting_and_ready_are_those_of_the_standard():
    assert b"\xff" + bytes(8) + b"\x7f\x03\x01NULL" + bytes(16) + bytes(32) == GREETING
    assert ready(b"DEALER") == b"\x04\x1c\x05READY\x0bSocket-Type\0\0\0\x06DEALER"


@pytest.mark.parametrize("size", [1, 7, 64, 1000, 65_536, 10**6])
def test_messages_are_whole_however_the_stream_is_cut(size):
    said = BEGIN + b"".join(message(*parts) for parts in MESSAGES)
    ear = Ear()
    for start in range(0, len(said), size):
        ear.reader.feed(said[start : start + size])

    assert ear.heard == MESSAGES
    assert ear.reader.is_ready


def test_a_ping_is_answered_with_its_context_and_heard_by_nobody():
    ear = Ear(BEGIN + b"\x04\x09\x04PING\0\x3chi" + PING + message(b"m"))

    assert ear.answered == [b"\x04\x07\x04PONGhi", b"\x04\x05\x04PONG"]
    assert ear.heard == [[b"m"]]


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (b"GET / HTTP/1.1\r\n".ljust(64), "not ZMTP"),
        (GREETING[:10] + b"\x01" + GREETING[11:], "older ZMTP"),
        (GREETING.replace(b"NULL\0", b"PLAIN"), "mechanism other than NULL"),
        (GREETING + message(b"m"), "before READY"),
        (BEGIN + b"\x02" + (MAX_FRAME_BYTES + 1).to_bytes(8, "big"), "at most"),
        (BEGIN + b"\x04\x0c\x05ERROR\x05wrong", "the peer says: wrong"),
        (BEGIN + ready(b"DEALER"), "command"),
        (GREETING + b"\x06" + (MAX_COMMAND_BYTES + 1).to_bytes(8, "big"), "command"),
    ],
)
def test_what_is_not_zmtp_of_ours_is_refused(said, why):
    with pytest.raises(BadFrame, match=why):
        Ear(said)


def test_a_large_part_takes_no_more_memory_than_has_arrived():
    ear = Ear(BEGIN + header(MAX_FRAME_BYTES) + b"x" * 1000)

    assert ear.reader.missing == MAX_FRAME_BYTES - 1000
    assert len(ear.reader._part) == 1000
