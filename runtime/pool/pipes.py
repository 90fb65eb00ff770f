"""The two ends a worker process is held by: framed replies on a socket, and what user code prints on a pipe."""

import asyncio
from collections.abc import Callable
from typing import cast

OUTPUT_LINES_S = 100
"""Lines of user output passed on per worker and second; the rest is counted in one line."""

OUTPUT_LINE_LIMIT = 2_000
"""Characters kept of a line of user output."""


class FrameChannel(asyncio.Protocol):
    """Frames are a little-endian uint32 length and that many bytes. A length above `max_bytes` is told to `on_garbage`."""

    def __init__(
        self,
        max_bytes: int,
        on_frame: Callable[[bytes], None],
        on_garbage: Callable[[], None],
        on_end: Callable[[], None],
    ) -> None:
        self._max_bytes = max_bytes
        self._on_frame = on_frame
        self._on_garbage = on_garbage
        self._on_end = on_end
        self._transport: asyncio.Transport | None = None
        self._data = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by the loop."""
        self._transport = cast("asyncio.Transport", transport)

    def send(self, frame: bytes) -> None:
        """Queue one frame; ignored once the channel ended."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(len(frame).to_bytes(4, "little") + frame)

    def close(self) -> None:
        """Drop the channel and what is queued."""
        if self._transport is not None:
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        """Called by the loop."""
        self._data += data
        while len(self._data) >= 4:
            size = int.from_bytes(self._data[:4], "little")
            if size > self._max_bytes:
                self._on_garbage()
                self.close()
                return
            if len(self._data) < size + 4:
                return
            frame = bytes(self._data[4 : size + 4])
            del self._data[: size + 4]
            self._on_frame(frame)

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by the loop."""
        self._on_end()


class OutputLines(asyncio.SubprocessProtocol):
    """Passes printed lines on, at most OUTPUT_LINES_S a second, and tells when the pipe and the process end.

    `on_flood` is told once of more than `max_bytes` since the last `start_count`; nothing is passed on after it.
    """

    def __init__(
        self,
        max_bytes: int,
        on_line: Callable[[str], None],
        on_flood: Callable[[], None],
        on_pipe_end: Callable[[], None],
        on_exit: Callable[[], None],
    ) -> None:
        self._max_bytes = max_bytes
        self._on_line = on_line
        self._on_flood = on_flood
        self._on_pipe_end = on_pipe_end
        self._on_exit = on_exit
        self._rest = b""
        self._window_start = 0.0
        self._num_lines = 0
        self._num_bytes = 0
        self._flooded = False

    def start_count(self) -> None:
        """Another call begins: what it prints counts from here. Some of the last one's output may still be in the pipe."""
        self._num_bytes = 0

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        """Called by the loop."""
        if self._flooded:
            return
        self._num_bytes += len(data)
        if self._num_bytes > self._max_bytes:
            self._flooded = True
            self._on_flood()
            return
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > OUTPUT_LINE_LIMIT:
            lines.append(self._rest)
            self._rest = b""
        for line in lines:
            self._pass_on(line)

    def pipe_connection_lost(self, fd: int, exc: Exception | None) -> None:
        """Called by the loop."""
        if self._rest:
            self._pass_on(self._rest)
            self._rest = b""
        self._on_pipe_end()

    def process_exited(self) -> None:
        """Called by the loop."""
        self._on_exit()

    def _pass_on(self, line: bytes) -> None:
        now = asyncio.get_running_loop().time()
        if now - self._window_start >= 1.0:
            if self._num_lines > OUTPUT_LINES_S:
                self._on_line(f"… {self._num_lines - OUTPUT_LINES_S} lines of output were left out")
            self._window_start, self._num_lines = now, 0
        self._num_lines += 1
        if self._num_lines <= OUTPUT_LINES_S:
            self._on_line(line[:OUTPUT_LINE_LIMIT].decode(errors="replace"))
