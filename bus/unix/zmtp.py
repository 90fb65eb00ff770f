"""ZMTP 3.1 with the NULL mechanism (RFC 37), without I/O: what ZeroMQ speaks on a stream, for links that do without its I/O threads.

Greeting and READY leave at once, without waiting for the peer's: a link costs no round trip before its first message.
"""

import struct
from collections.abc import Callable, Sequence

from rubato.bus.codec import MAX_BUFFERS_BYTES, MAX_FRAME_BYTES, MAX_PARTS
from rubato.bus.errors import BadFrame

SIGNATURE = b"\xff\0\0\0\0\0\0\0\0\x7f"
MECHANISM = b"NULL".ljust(20, b"\0")
GREETING = SIGNATURE + b"\x03\x01" + MECHANISM + b"\0" + bytes(31)

MORE, LONG, COMMAND = 1, 2, 4
"""Flags: another part of the message follows; the size takes eight bytes; the part is a command."""

MAX_COMMAND_BYTES = 4096
"""Of READY with its properties, the longest; a PING has 22 bytes at most."""

GATHERED_BYTES = 2 * 1024
"""A larger part is put together in memory of its own; a smaller one is read again together with what follows."""

MAX_MESSAGE_BYTES = MAX_FRAME_BYTES + MAX_BUFFERS_BYTES + MAX_FRAME_BYTES

PING = b"\x04\x07\x04PING\0\0"
"""Time to live 0: we do not ask the peer to drop us."""

_long_header = struct.Struct(">BQ").pack
_NOTHING: Sequence[memoryview] = ()

Heard = Callable[[memoryview, Sequence[memoryview]], None]
"""Called with the first part of each message, and the parts beside it."""


def ready(socket_type: bytes) -> bytes:
    """The command that ends the handshake. Libraries look at each other's type, and a DEALER goes with a ROUTER."""
    value = b"\x05READY\x0bSocket-Type" + len(socket_type).to_bytes(4, "big") + socket_type
    return bytes((COMMAND, len(value))) + value


def header(size: int, *, more: bool = False) -> bytes:
    """What stands before a part of `size` bytes."""
    return bytes((more, size)) if size < 256 else _long_header(LONG | more, size)


class Reader:
    """Puts together what one peer says. After an error it must not be fed again."""

    __slots__ = ("_answer", "_beside", "_flags", "_heard", "_is_greeted", "_part", "_size_bytes", "_tail", "is_ready", "missing")

    def __init__(self, heard: Heard, answer: Callable[[bytes], None]) -> None:
        """`answer` sends raw bytes back: the reply to a PING."""
        self.is_ready = False
        """The handshake is over."""
        self.missing = 0
        """Bytes that the large part under way lacks; 0 when none is."""
        self._heard = heard
        self._answer = answer
        self._is_greeted = False
        self._tail = b""
        self._part = bytearray()
        self._flags = 0
        self._beside: list[memoryview] = []
        self._size_bytes = 0

    def feed(self, data: bytes) -> None:
        """Take in what has arrived; messages that it completes are handed on before this returns.

        Raises BadFrame for what is not ZMTP or too large, and for the latter before anything is allocated.
        """
        if self.missing:
            data = self._gather(data)
        elif self._tail:
            data, self._tail = self._tail + data, b""
        if not self._is_greeted:
            if len(data) < len(GREETING):
                self._tail = data
                return
            data = self._greet(data)
        view, at, end = memoryview(data), 0, len(data)
        while at + 2 <= end:
            flags = data[at]
            if flags & LONG:
                start = at + 9
                if start > end:
                    break
                size = int.from_bytes(view[at + 1 : start], "big")
                if flags & COMMAND and size > MAX_COMMAND_BYTES:
                    raise BadFrame(f"a command of {size} bytes; at most {MAX_COMMAND_BYTES} are allowed")
                if size > MAX_FRAME_BYTES:
                    raise BadFrame(f"a part of {size} bytes; at most {MAX_FRAME_BYTES} are allowed")
            else:
                size, start = data[at + 1], at + 2
            stop = start + size
            if stop > end:
                if size > GATHERED_BYTES:
                    # It grows as it arrives, whatever size it announced.
                    self._part, self._flags, self.missing = bytearray(view[start:]), flags, stop - end
                    return
                break
            at = stop
            if (flags == LONG or not flags) and self.is_ready and not self._beside:
                self._heard(view[start:stop], _NOTHING)
            else:
                self._take(flags, view[start:stop])
        self._tail = data[at:]

    def _greet(self, data: bytes) -> bytes:
        """What follows the greeting."""
        if data[0] != SIGNATURE[0] or data[9] != SIGNATURE[9]:
            raise BadFrame("not ZMTP")
        if data[10] < 3 or data[12:32] != MECHANISM:
            raise BadFrame("an older ZMTP than 3.0, or a mechanism other than NULL")
        self._is_greeted = True
        return data[len(GREETING) :]

    def _gather(self, data: bytes) -> bytes:
        """Fill the large part under way; what follows it."""
        taken = data[: self.missing]
        self._part += taken
        self.missing -= len(taken)
        if self.missing:
            return b""
        part, self._part = self._part, bytearray()
        self._take(self._flags, memoryview(part).toreadonly())
        return data[len(taken) :]

    def _take(self, flags: int, part: memoryview) -> None:
        if flags & COMMAND:
            self._obey(bytes(part))
        elif not self.is_ready:
            raise BadFrame("a message before READY")
        else:
            self._collect(part, more=bool(flags & MORE))

    def _collect(self, part: memoryview, *, more: bool) -> None:
        """One of several parts of a message."""
        self._size_bytes += len(part) + 1
        if self._size_bytes > MAX_MESSAGE_BYTES:
            raise BadFrame(f"a message of more than {MAX_MESSAGE_BYTES} bytes")
        # The frame, and one part more than may be: so the reader of the table sees that it does not match.
        if len(self._beside) < MAX_PARTS + 2:
            self._beside.append(part)
        if not more:
            (first, *beside), self._beside, self._size_bytes = self._beside, [], 0
            self._heard(first, beside)

    def _obey(self, command: bytes) -> None:
        if command.startswith(b"\x05READY"):
            if self.is_ready:
                raise BadFrame("the command READY came twice")
            self.is_ready = True
        elif command.startswith(b"\x04PING"):
            pong = b"\x04PONG" + command[7:23]  # after its time to live, a context to send back
            self._answer(bytes((COMMAND, len(pong))) + pong)
        elif command.startswith(b"\x05ERROR"):
            raise BadFrame(f"the peer says: {command[7:].decode(errors='replace')}")
