"""Bounds that every store implementation refuses to cross, checked before anything is sent or kept."""

from collections.abc import Mapping

from runtime.store.store import Append, Fence, WriteNumber

MAX_VALUE_BYTES = 8 * 1024 * 1024
"""Of one key or entry: the server makes one change at a time, and a larger one would hold up everybody. More is a blob."""
MAX_INTEGER = 2**53
"""Lua numbers and Redis scores are doubles: above this, integers are no longer exact."""
READ_LIMIT = 1000
"""Entries one `read` returns at most."""


def check_integer(name: str, value: int, *, least: int = -MAX_INTEGER) -> None:
    """Raises ValueError outside `least` .. 2**53."""
    if not least <= value <= MAX_INTEGER:
        raise ValueError(f"{name} is {value}, which is not within {least} and {MAX_INTEGER}")


def check_write(
    changes: Mapping[str, bytes | None],
    fence: Fence | None,
    turn: WriteNumber | None = None,
    append: Append | None = None,
) -> None:
    """Raises ValueError for a token or index that is no such number, a turn without a fence, and values that are too large."""
    if fence is not None:
        check_integer("fence token", fence.token, least=0)
    if turn is not None:
        check_integer("turn", turn.number, least=1)
        if fence is None:
            raise ValueError("a write has a turn only behind a fence")
    for key, value in changes.items():
        check_size(key, value or b"")
    if append is not None:
        check_integer("first index", append.first, least=1)
        for entry in append.entries:
            check_size(append.stream, entry)


def check_size(name: str, value: bytes) -> None:
    """Raises ValueError for more bytes than one value may have."""
    if len(value) > MAX_VALUE_BYTES:
        raise ValueError(f"{name!r} gets {len(value)} bytes; at most {MAX_VALUE_BYTES} fit, put more into a blob")


def check_ttl(ttl_s: float) -> None:
    """Raises ValueError for a lease that would never live."""
    if not ttl_s > 0:
        raise ValueError(f"a lease needs a time to live above 0, not {ttl_s} s")
