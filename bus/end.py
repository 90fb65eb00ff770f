"""Our end of one connection, whatever moves its bytes: a stream of our own within a host, libzmq's sockets between hosts."""

from collections.abc import Callable, Sequence
from typing import Protocol

GONE = "the peer closed the connection or died"
ABSENT = "nobody listens there"

LAST_SENDS_S = 0.5
"""What was posted before a transport closes has so long to leave; on one host it needs a millisecond."""

Rest = Callable[[], None]
"""Blocks until the peer has taken what was unsent, but not for longer than `LAST_SENDS_S`. May run in any thread."""


class End(Protocol):
    """Sends frames to one peer. That the peer has gone is never raised; it is told, later, to whoever made the end."""

    def send(self, data: bytes | bytearray, buffers: Sequence[memoryview | bytes]) -> None:
        """Queue one frame and the buffers beside it."""
        ...

    def flushed(self) -> None:
        """To be called once after the last `send` of a tick."""
        ...

    def close(self, *, linger: bool = False) -> Rest | None:
        """Stop reading and close; with `linger`, what is unsent leaves once the result, if any, has been called."""
        ...


Came = Callable[[bytes, End, memoryview, Sequence[memoryview]], None]
"""A message from a peer that came to us: the name of its link, our end of it, its frame, the parts beside."""

Left = Callable[[bytes, str], None]
"""The link of that name has ended, for this reason; it had been named by `Came`."""
