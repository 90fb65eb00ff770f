"""Bounds that every store implementation refuses to cross, checked before anything is sent or kept."""

from runtime.store.store import Fence
from runtime.store.workset import Item

MAX_PAYLOAD_BYTES = 64 * 1024
"""Larger payloads are blobs, with only their digest in the store."""
MAX_NOTE_BYTES = 16 * 1024
"""A note is kept for the ended log, which outlives the payload, so it is smaller."""
MAX_INTEGER = 2**53
"""Lua numbers and Redis scores are doubles: above this, integers are no longer exact."""
READ_LIMIT = 1000
"""Entries one `read` returns at most."""


def check_item(item: Item) -> None:
    """Raises ValueError for a payload or note that is too large, or a score that a double can't hold."""
    if len(item.payload) > MAX_PAYLOAD_BYTES:
        raise ValueError(
            f"item {item.id!r} has {len(item.payload)} bytes of payload; "
            f"at most {MAX_PAYLOAD_BYTES} fit, put larger ones into a blob"
        )
    check_note(item.id, item.note)
    check_integer("score", item.score)


def check_note(item_id: str, note: bytes) -> None:
    """Raises ValueError for a note that is too large."""
    if len(note) > MAX_NOTE_BYTES:
        raise ValueError(f"item {item_id!r} has a note of {len(note)} bytes; at most {MAX_NOTE_BYTES} fit")


def check_integer(name: str, value: int, *, least: int = -MAX_INTEGER) -> None:
    """Raises ValueError outside `least` .. 2**53."""
    if not least <= value <= MAX_INTEGER:
        raise ValueError(f"{name} is {value}, which is not within {least} and {MAX_INTEGER}")


def check_fence(fence: Fence | None) -> None:
    """Raises ValueError for a token that is no incarnation."""
    if fence is not None:
        check_integer("fence token", fence.token, least=0)


def check_ttl(ttl_s: float) -> None:
    """Raises ValueError for a lease that would never live."""
    if not ttl_s > 0:
        raise ValueError(f"a lease needs a time to live above 0, not {ttl_s} s")
