"""The Store: the little state that must outlive processes, behind one Protocol; its bounds, and what it refuses.

RedisStore (runtime/store/redis.py) implements it, and MemoryStore (runtime/memory.py).
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from rubato.runtime.errors import RubatoError


class StoreError(RubatoError):
    """Base of every error of the store."""


class Fenced(StoreError):
    """The writer's fence is older than one already seen: it was replaced and must stop. Nothing was changed."""


class Forgotten(StoreError):
    """The store no longer has the write before this one: it came back without its newest writes. Nothing was changed."""


class StoreUnavailable(StoreError):
    """The backend could not be reached within the retry budget, or refused the password; names the URL and what to do."""


class StoreFull(StoreUnavailable):
    """The backend answers, but can't keep a change: it lacks memory, disk or a replica. It is worth trying again, for as long as it takes.

    Nothing was changed, unless it was the replica that did not acknowledge the change: that one may be undone by a failover.
    """


def fenced(name: str, token: int, newest: int) -> Fenced:
    """The same sentence from every implementation, as for those below."""
    return Fenced(f"{name!r} writes with token {token}, but {newest} was seen: a newer one took over")


def forgotten(name: str, token: int, number: int) -> Forgotten:
    return Forgotten(f"{name!r} makes write {number} with token {token}, but the store lost the one before it")


def not_a_number(key: str) -> ValueError:
    return ValueError(f"key {key!r} holds something else than an integer")


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
    """Result of `Store.fenced`: given by a writer that takes the fence over, or that writes anew what the store forgot."""


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
    which is one, when the backend can't keep it.
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

    async def held(self, name: str) -> Lease | None:
        """The live lease of that name."""
        ...

    async def leases(self, prefix: str) -> dict[str, Lease]:
        """Live leases whose name starts with `prefix`."""
        ...

    async def holders(self, prefix: str) -> dict[str, int]:
        """The same with their tokens alone, which is less to send."""
        ...

    async def full(self) -> str:
        """Why the backend takes no more changes (memory, disk, no replica), in a sentence; empty while it does."""
        ...

    async def close(self) -> None: ...


# -- what every implementation refuses, before anything is sent or kept ------------------------------------------------

MAX_VALUE_BYTES = 8 * 1024 * 1024
"""Of one key or entry: the server makes one change at a time, and a larger one would hold up all callers. More is a blob."""
MAX_INTEGER = 2**53
"""Lua numbers and Redis scores are doubles: above this, integers are no longer exact."""
READ_LIMIT = 1000
"""Entries one `read` returns at most."""


def check_integer(name: str, value: int, *, least: int = -MAX_INTEGER) -> None:
    """Raises ValueError outside `least` .. 2**53."""
    if not least <= value <= MAX_INTEGER:
        raise ValueError(f"{name} is {value}, which is not within {least} and {MAX_INTEGER}")


def check_write(
    changes: Mapping[str, bytes | None], fence: Fence | None, turn: WriteNumber | None = None, append: Append | None = None
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
