"""Store and blobs of one process, for simulation, tests and embedding: time is the loop's and nothing is random."""

import asyncio
from bisect import bisect_right
from collections import deque
from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

from rubato.runtime.blobs.blob import KEPT, BlobError, BlobInfo, Draft, by_age, check_blob, digest_of, missing
from rubato.runtime.store.store import (
    READ_LIMIT,
    Append,
    Fence,
    Lease,
    WriteNumber,
    check_integer,
    check_ttl,
    check_write,
    fenced,
    forgotten,
    not_a_number,
)


class Counters:
    """Give no number twice, as scripts/above.lua. A store that came back may have forgotten numbers: its first one of each counter
    leaps to the milliseconds since any counted."""

    def __init__(self) -> None:
        self.life = 0
        """Number of the server's start; a simulated restart gives another one."""
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

    async def held(self, name: str) -> Lease | None:
        return self._live().get(name)

    async def leases(self, prefix: str) -> dict[str, Lease]:
        return {name: lease for name, lease in self._live().items() if name.startswith(prefix)}

    async def holders(self, prefix: str) -> dict[str, int]:
        return {name: lease.token for name, lease in self._live().items() if name.startswith(prefix)}

    async def full(self) -> str:
        return ""

    async def close(self) -> None:
        """Nothing to let go of: what was stored stays readable."""

    def _live(self) -> dict[str, Lease]:
        now = self._now()
        held = sorted(self._leases.items())
        return {name: Lease(each.token, each.value, each.expires_at - now) for name, each in held if each.expires_at > now}

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


class MemoryBlobStore:
    """Keeps the newest two versions of each name."""

    def __init__(self) -> None:
        self._blobs: dict[str, dict[int, tuple[BlobInfo, memoryview]]] = {}
        self._drafts: deque[tuple[int, memoryview]] = deque(maxlen=KEPT)
        self._num_drafts = 0

    async def draft(self, name: str, version: int, term: int, size_bytes: int) -> Draft:
        check_blob(name, version)
        memory = memoryview(bytearray(size_bytes))
        self._num_drafts += 1
        self._drafts.append((self._num_drafts, memory))
        info = BlobInfo(name, version, term, "", size_bytes)
        return Draft(info, memory, partial(self._show, memory.toreadonly()), self._num_drafts)

    async def shared(self, segment: int, size_bytes: int) -> memoryview:
        found = next((memory for number, memory in self._drafts if number == segment and len(memory) == size_bytes), None)
        if found is None:
            raise BlobError(f"segment {segment} is no draft of {size_bytes} bytes")
        return found

    async def put(self, name: str, version: int, term: int, parts: Sequence[memoryview | bytes], *, checked: bool = True) -> BlobInfo:
        check_blob(name, version)
        content = b"".join(parts)
        info = BlobInfo(name, version, term, digest_of(content) if checked else "", len(content))
        return await self._show(memoryview(content), info)

    async def _show(self, content: memoryview, info: BlobInfo) -> BlobInfo:
        versions = self._blobs.setdefault(info.name, {})
        known = versions.get(info.version)
        if known is not None and known[0].term > info.term:
            return known[0]
        versions[info.version] = (info, content)
        for old in by_age([each for each, _ in versions.values()])[:-KEPT]:
            del versions[old.version]
        return info

    async def get(self, name: str, version: int, *, check: bool = True) -> tuple[BlobInfo, memoryview]:
        """`check` changes nothing: what lies in one's own memory was never anywhere else."""
        try:
            return self._blobs[name][version]
        except KeyError:
            raise missing(name, version) from None

    async def newest(self, name: str) -> BlobInfo | None:
        versions = self._blobs.get(name)
        return by_age([info for info, _ in versions.values()])[-1] if versions else None

    async def forget(self, name: str) -> None:
        self._blobs.pop(name, None)

    async def close(self) -> None:
        """Nothing to let go of: what was put stays, for the others that hold this store."""
