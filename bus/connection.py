"""What carries a link's bytes: a Unix socket on the event loop within a host, libzmq's sockets between hosts.

Three words for what is between two processes. A *link* is what they say to each other, HELLO first (bus/link.py). A *connection* is our
end of what carries it. A *listener* is where the connections of others come in.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol

from bus.link import Peer, Refusals

GONE = "the peer closed the connection or died"
ABSENT = "nobody listens there"

LAST_SENDS_S = 0.5
"""What was posted before a transport closes has so long to leave; on one host it needs a millisecond."""

Rest = Callable[[], None]
"""Blocks until the peer has taken what was unsent, but not for longer than `LAST_SENDS_S`. May run in any thread."""


class Connection(Protocol):
    """Sends frames to one peer. That the peer has gone is never raised; its owner is told, later."""

    peer: Peer
    """The address it was opened to, or the name under which the listener took it in."""

    def send(self, data: bytes | bytearray, buffers: Sequence[memoryview | bytes]) -> None:
        """Queue one frame and the buffers beside it."""
        ...

    def flushed(self) -> None:
        """To be called once after the last `send` of a tick."""
        ...

    def close(self, *, linger: bool = False) -> Rest | None:
        """Stop reading and close; with `linger`, what is unsent leaves once the result, if any, has been called."""
        ...


class Owner(Protocol):
    """Whom connections and listeners report to: the transport that they belong to. All on its event loop."""

    loop: asyncio.AbstractEventLoop
    refusals: Refusals

    def heard(self, connection: Connection, first: memoryview, beside: Sequence[memoryview]) -> None:
        """A message: its frame, and the parts beside it."""
        ...

    def drained(self) -> None:
        """Called after messages were handed to `heard` because a socket had become readable."""
        ...

    def ended(self, connection: Connection, reason: str) -> None:
        """The connection is over, and not because we closed it. Later than whatever found out, and after its last words."""
        ...
