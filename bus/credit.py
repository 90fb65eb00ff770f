"""Credit: how much one sender may have queued at one actor. Pure accounting; invariant: granted - consumed >= 0.

The receiver's queue never holds more than it granted. Sender and receiver compute the charge of a message alike, from its size.
"""

WINDOW_MESSAGES = 1024
WINDOW_BYTES = 4 * 1024 * 1024
"""Both sides start from these without a word on the wire. Large enough that a sender of small messages goes on while the receiver
works through the batch before, small enough that what 64 senders may have queued fits in memory: the bytes bound that."""

REGRANT_MESSAGES = WINDOW_MESSAGES // 4
REGRANT_BYTES = WINDOW_BYTES // 2


def charge(size_bytes: int) -> int:
    """Bytes a message costs: its size, but never more than half the window.

    The receiver may hold back almost half a window before it re-grants. A message that cost more than the other half could
    wait for ever; capped, at most two such giants are in flight.
    """
    return min(size_bytes, REGRANT_BYTES)


class Account:
    """Sender's side of one (link, actor): what may still be sent without hearing from the receiver."""

    __slots__ = ("messages", "size_bytes")

    def __init__(self) -> None:
        self.messages = WINDOW_MESSAGES
        self.size_bytes = WINDOW_BYTES

    def take(self, size_bytes: int) -> bool:
        """Pay for one message of `size_bytes`; False, and nothing is paid, when the credit does not reach."""
        cost = size_bytes if size_bytes < REGRANT_BYTES else REGRANT_BYTES
        if self.messages < 1 or self.size_bytes < cost:
            return False
        self.messages -= 1
        self.size_bytes -= cost
        return True

    def grant(self, messages: int, size_bytes: int) -> None:
        """The receiver grants more. Negative amounts, which no receiver of ours sends, count as nothing."""
        self.messages += max(0, messages)
        self.size_bytes += max(0, size_bytes)


class Grants:
    """Receiver's side of one (link, actor): gathers what was consumed until it is worth a message."""

    __slots__ = ("messages", "size_bytes")

    def __init__(self) -> None:
        self.messages = 0
        self.size_bytes = 0

    def consumed(self, size_bytes: int) -> tuple[int, int]:
        """One message left the queue. Returns (messages, bytes) to grant now, or (0, 0) while too little has gathered."""
        self.messages += 1
        self.size_bytes += size_bytes if size_bytes < REGRANT_BYTES else REGRANT_BYTES
        if self.messages < REGRANT_MESSAGES and self.size_bytes < REGRANT_BYTES:
            return 0, 0
        return self.collect()

    def collect(self) -> tuple[int, int]:
        """All that has gathered, to travel on a message that goes to the sender anyway."""
        gathered = self.messages, self.size_bytes
        self.messages = self.size_bytes = 0
        return gathered
