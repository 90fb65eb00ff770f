"""The Store: the little state that must outlive processes, behind one Protocol with a memory and a Redis implementation."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol


class Fence(NamedTuple):
    """A write is refused with `Fenced` when `name` was ever fenced with a higher `token`: zombies can't write."""

    name: str
    token: int


class WriteNumber(NamedTuple):
    """Numbers the writes under a fence's token from 1 on, so that a store which lost some of them can't hide it.

    The store keeps (token, number) of a fence as one value, and a write is made where that is what the writer takes it for: `after`, or
    where none is said, the write before this one. A write that comes again changes nothing; any other is refused with `Forgotten`.
    """

    number: int
    after: tuple[int, int] | None = None
    """What `Store.fenced` told, by whoever takes the fence over, or says anew what the store forgot."""


class Append(NamedTuple):
    """Entries of `stream` from index `first` on, in place of what it held from there.

    Entries up to index `forget` are forgotten: their reader is done with them.
    """

    stream: str
    first: int
    entries: Sequence[bytes]
    forget: int = 0


class Lease(NamedTuple):
    """A live holder: `token` is its incarnation, `value` what it wrote last, `remaining_s` until it lapses."""

    token: int
    value: bytes
    remaining_s: float


class Store(Protocol):
    """Keys are relative to the run (the implementation prefixes `rubato:{run}:`). Values are bytes.

    Every method raises `StoreUnavailable` when the backend can't be reached within its retry budget, and every change `StoreFull`,
    which is one, when the backend has no room for it.
    Methods marked *acknowledged* return only when the write is as durable as `state.durability` says.
    """

    async def get(self, key: str) -> bytes | None: ...

    async def scan(self, prefix: str) -> dict[str, bytes]:
        """Every key that starts with `prefix`, sorted."""
        ...

    async def fenced(self, name: str) -> tuple[int, int]:
        """The newest token that wrote under the fence `name`, and the number of its newest write; (0, 0) where none has."""
        ...

    async def fetch(self, keys: Sequence[str]) -> list[bytes | None]:
        """The values of `keys`, in their order, in one round trip."""
        ...

    async def write(
        self,
        changes: Mapping[str, bytes | None],
        *,
        fence: Fence | None = None,
        turn: WriteNumber | None = None,
        append: Append | None = None,
    ) -> None:
        """Set (bytes) or delete (None) all keys, and append to a stream, in one atomic step; acknowledged.

        Raises Fenced for a zombie, and Forgotten where the store lost a write before `turn`; either changes nothing.
        """
        ...

    async def compare_and_set(
        self, key: str, expected: bytes | None, value: bytes, *, fence: Fence | None = None
    ) -> bool:
        """Set `key` only where it still holds `expected` (None: absent); acknowledged."""
        ...

    async def increment(self, key: str, *, at_least: int = 0) -> int:
        """max(the next number, at_least), stored and returned: stored + 1, or far more once the store restarted, so none is given twice."""
        ...

    async def append(self, stream: str, value: bytes, *, limit: int = 10_000) -> int:
        """Add to a stream and return its index (from 1, gapless); entries older than the newest `limit` are forgotten."""
        ...

    async def read(self, stream: str, after: int, *, wait_s: float = 0.0) -> list[tuple[int, bytes]]:
        """Up to 1,000 entries with index > `after`; with none, waits up to `wait_s` for one."""
        ...

    async def lease(self, name: str, token: int, value: bytes, ttl_s: float) -> bool:
        """Take or renew `name`. False, and no change, when a live or released lease of a higher token was seen."""
        ...

    async def release(self, name: str, token: int) -> bool:
        """Give `name` up if `token` holds it. A lower token can't take it afterwards."""
        ...

    async def leases(self, prefix: str) -> dict[str, Lease]:
        """Live leases whose name starts with `prefix`."""
        ...

    async def full(self) -> str:
        """Why the backend takes no more changes (memory, disk), in a sentence; empty while it does."""
        ...

    async def close(self) -> None: ...
