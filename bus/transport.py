"""The seam between the runtime and the wire: envelopes to and from peers, in order per link, never blocking."""

from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from bus.codec import Envelope
from bus.link import Link, Peer, Refusals


class Delivery(msgspec.Struct, gc=False):
    """One envelope as it arrived, with its out-of-band buffers and the peer to answer. A struct: made six times faster than a tuple with names."""

    peer: Peer
    envelope: Envelope
    buffers: Sequence[memoryview]
    deadline: float = 0.0
    """Loop time by which the asker wants its reply, 0 for none; the receiving runtime works it out from the envelope's budget."""


FrameSeen = Callable[[Link, bool, bytes | bytearray | memoryview], None]
"""Sees a frame on its link; True for one that we send."""


class Transport(Protocol):
    """Moves envelopes. Order is kept per link; a lost link loses a suffix of what was in flight, and says so."""

    refusals: Refusals
    """Who and what was turned away here, for the runtime to count and log."""
    tap: FrameSeen | None
    """Sees every frame that arrives or leaves, while there is one. It must not post."""

    @property
    def address(self) -> str:
        """Where peers reach us; known once `start` has returned."""
        ...

    @property
    def public_address(self) -> str:
        """Where peers on other hosts reach us; empty when only this host can."""
        ...

    async def start(self, deliver: Callable[[Delivery], None], down: Callable[[Peer, str], None]) -> None:
        """Bind, then call `deliver` for every arriving envelope and `down(peer, reason)` once per lost or refused link.

        Both callbacks run on the event loop and must not block. Raises BadAddress when the endpoint is taken.
        """
        ...

    def post(self, peer: Peer, envelope: Envelope, buffers: Sequence[memoryview | bytes] = ()) -> None:
        """Queue for `peer`; all envelopes of one loop tick travel together. Opens the link on first use to an address.

        Never blocks and never drops while the link lives; what bounds the queue is the credit that the runtime keeps.
        Buffers are not copied: leave them alone until the peer has them. Raises BadFrame for what exceeds a frame's limits.
        """
        ...

    async def close(self) -> None:
        """Flush briefly, then release every socket. Afterwards nothing is delivered."""
        ...
