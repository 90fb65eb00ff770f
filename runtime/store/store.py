"""The Store: the little state that must outlive processes, behind one Protocol; its bounds, and the store of one process.

RedisStore (runtime/store/redis.py) is the other implementation. MemoryStore is for simulation, tests and embedding: time is the
loop's and nothing is random.
"""

import asyncio
from bisect import bisect_right
from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from runtime.store.errors import fenced, forgotten, not_a_number


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


# -- what every implementation refuses, before anything is sent or kept ------------------------------------------------

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


# -- in memory ---------------------------------------------------------------------------------------------------------


class Counters:
    """Give no number twice, as scripts/above.lua. A store that came back may have forgotten numbers: its first one of each counter
    leaps to the milliseconds since any counted."""

    def __init__(self) -> None:
        self.life = 0
        """Which start of the server this is; whoever simulates a restart gives another number."""
        self._first: tuple[int, float] | None = None
        self._last: dict[str, int] = {}

    def above(self, name: str, stored: int) -> int:
        """The next number of `name` after `stored`."""
        now = asyncio.get_running_loop().time()
        self._first = first, began = self._first or (self.life, now)
        last = self._last.get(name, first)
        self._last[name] = self.life
        return stored + 1 if last == self.life else max(stored + 1, int(1000 * (now - began)))


class _Held(NamedTuple):
    token: int
    value: bytes
    expires_at: float
    """Loop time; 0 once released."""


class _Stream:
    """Entries by rising index, the newest at the right; `grew` is set and replaced at every append."""

    def __init__(self) -> None:
        self.entries: deque[tuple[int, bytes]] = deque()
        self.last = 0
        self.grew = asyncio.Event()

    def append(self, value: bytes, limit: int) -> int:
        self.last += 1
        self.entries.append((self.last, value))
        while len(self.entries) > limit:
            self.entries.popleft()
        self.grew.set()
        self.grew = asyncio.Event()
        return self.last

    def replace(self, change: Append) -> None:
        """What the stream held from the first of the new entries on gives way."""
        while self.entries and self.entries[-1][0] >= change.first:
            self.entries.pop()
        self.last = change.first - 1
        for entry in change.entries:
            self.append(bytes(entry), len(self.entries) + 1)
        while self.entries and self.entries[0][0] <= change.forget:
            self.entries.popleft()

    def after(self, index: int) -> list[tuple[int, bytes]]:
        entries = list(self.entries)
        begin = bisect_right(entries, index, key=lambda entry: entry[0])
        return entries[begin : begin + READ_LIMIT]


class MemoryStore:
    """A `Store` shared by everything that holds a reference to it. Each call takes effect at once, without yielding."""

    def __init__(self) -> None:
        self.counters = Counters()
        self._keys: dict[str, bytes] = {}
        self._fences: dict[str, tuple[int, int]] = {}
        """Name → newest token and the number of its newest write."""
        self._streams: dict[str, _Stream] = {}
        self._leases: dict[str, _Held] = {}

    async def get(self, key: str) -> bytes | None:
        return self._keys.get(key)

    async def scan(self, prefix: str) -> dict[str, bytes]:
        return {key: self._keys[key] for key in sorted(self._keys) if key.startswith(prefix)}

    async def fenced(self, name: str) -> tuple[int, int]:
        return self._fences.get(name, (0, 0))

    async def fetch(self, keys: Sequence[str]) -> list[bytes | None]:
        return [self._keys.get(key) for key in keys]

    async def write(
        self,
        changes: Mapping[str, bytes | None],
        *,
        fence: Fence | None = None,
        turn: WriteNumber | None = None,
        append: Append | None = None,
    ) -> None:
        check_write(changes, fence, turn, append)
        if not self._passes(fence, turn):
            return
        if append is not None:
            self._streams.setdefault(append.stream, _Stream()).replace(append)
        for key, value in changes.items():
            if value is None:
                self._keys.pop(key, None)
            else:
                self._keys[key] = bytes(value)

    async def increment(self, key: str, *, at_least: int = 0) -> int:
        check_integer("at_least", at_least)
        try:
            number = max(self.counters.above(key, int(self._keys.get(key, b"0"))), at_least)
        except ValueError:
            raise not_a_number(key) from None
        self._keys[key] = b"%d" % number
        return number

    async def append(self, stream: str, value: bytes, *, limit: int = 10_000) -> int:
        check_integer("limit", limit, least=1)
        return self._streams.setdefault(stream, _Stream()).append(bytes(value), limit)

    async def read(self, stream: str, after: int, *, wait_s: float = 0.0) -> list[tuple[int, bytes]]:
        check_integer("after", after, least=0)
        source = self._streams.setdefault(stream, _Stream())
        try:
            async with asyncio.timeout(max(wait_s, 0.0)):
                while source.last <= after and wait_s > 0:
                    await source.grew.wait()
        except TimeoutError:
            return []
        return source.after(after)

    async def lease(self, name: str, token: int, value: bytes, ttl_s: float) -> bool:
        check_integer("token", token, least=0)
        check_ttl(ttl_s)
        seen = self._leases.get(name)
        if seen is not None and seen.token > token:
            return False
        self._leases[name] = _Held(token, bytes(value), self._now() + ttl_s)
        return True

    async def release(self, name: str, token: int) -> bool:
        seen = self._leases.get(name)
        if seen is None or seen.token != token or seen.expires_at <= self._now():
            return False
        self._leases[name] = _Held(token, b"", 0.0)
        return True

    async def leases(self, prefix: str) -> dict[str, Lease]:
        now = self._now()
        return {
            name: Lease(held.token, held.value, held.expires_at - now)
            for name, held in sorted(self._leases.items())
            if name.startswith(prefix) and held.expires_at > now
        }

    async def full(self) -> str:
        return ""

    async def close(self) -> None:
        """Nothing to let go of: what was stored stays readable."""

    def _passes(self, fence: Fence | None, turn: WriteNumber | None) -> bool:
        """False where this very write was made before. Raises Fenced and Forgotten."""
        if fence is None:
            return True
        stored = self._fences.get(fence.name, (0, 0))
        if fence.token < stored[0]:
            raise fenced(fence.name, fence.token, stored[0])
        if turn is None:
            self._fences[fence.name] = max(stored, (fence.token, 0))
            return True
        if stored == (fence.token, turn.number):
            return False
        if stored != (turn.after or (fence.token, turn.number - 1)):
            raise forgotten(fence.name, fence.token, turn.number)
        self._fences[fence.name] = (fence.token, turn.number)
        return True

    def _now(self) -> float:
        return asyncio.get_running_loop().time()
