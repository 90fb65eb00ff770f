"""MemoryStore: the store of one process, for simulation, tests and embedding; time is the loop's and nothing is random."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any, NamedTuple, cast

from runtime.store.counting import Counters
from runtime.store.errors import fenced, not_a_number
from runtime.store.limits import READ_LIMIT, check_fence, check_integer, check_ttl
from runtime.store.memory_workset import MemoryWorkSet
from runtime.store.store import Fence, Lease
from runtime.store.workset import WorkSet

CHANGES = frozenset({"put", "end", "seal", "discard", "claim", "commit", "new_epoch"})
"""Of a WorkSet: what a fence refuses to a zombie."""


class _Held(NamedTuple):
    token: int
    value: bytes
    expires_at: float
    """Loop time; 0 once released."""


class _Stream:
    """Entries with gapless indices, the newest at the right; `grew` is set and replaced at every append."""

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

    def after(self, index: int) -> list[tuple[int, bytes]]:
        skip = max(0, len(self.entries) - (self.last - index))
        return [self.entries[at] for at in range(skip, min(len(self.entries), skip + READ_LIMIT))]


class _Fenced:
    """A `MemoryWorkSet` whose changes first pass the fence."""

    def __init__(self, workset: MemoryWorkSet, check: Callable[[], None]) -> None:
        self._workset, self._check = workset, check

    def __getattr__(self, name: str) -> Callable[..., Awaitable[Any]]:
        method: Callable[..., Awaitable[Any]] = getattr(self._workset, name)

        async def change(*args: Any, **options: Any) -> Any:
            self._check()
            return await method(*args, **options)

        return change if name in CHANGES else method


class MemoryStore:
    """A `Store` shared by everything that holds a reference to it. Each call takes effect at once, without yielding."""

    def __init__(self) -> None:
        self.counters = Counters()
        self._keys: dict[str, bytes] = {}
        self._fences: dict[str, int] = {}
        self._streams: dict[str, _Stream] = {}
        self._leases: dict[str, _Held] = {}
        self._worksets: dict[str, MemoryWorkSet] = {}

    async def get(self, key: str) -> bytes | None:
        return self._keys.get(key)

    async def scan(self, prefix: str) -> dict[str, bytes]:
        return {key: self._keys[key] for key in sorted(self._keys) if key.startswith(prefix)}

    async def write(self, changes: Mapping[str, bytes | None], *, fence: Fence | None = None) -> None:
        self._pass(fence)
        for key, value in changes.items():
            if value is None:
                self._keys.pop(key, None)
            else:
                self._keys[key] = bytes(value)

    async def compare_and_set(
        self, key: str, expected: bytes | None, value: bytes, *, fence: Fence | None = None
    ) -> bool:
        self._pass(fence)
        if self._keys.get(key) != expected:
            return False
        self._keys[key] = bytes(value)
        return True

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

    def workset(self, name: str, *, fence: Fence | None = None) -> WorkSet:
        check_fence(fence)
        workset = self._worksets.setdefault(name, MemoryWorkSet(partial(self.counters.above, f"{name} epoch")))
        return workset if fence is None else cast("WorkSet", _Fenced(workset, partial(self._pass, fence)))

    async def full(self) -> str:
        return ""

    async def close(self) -> None:
        """Nothing to let go of: what was stored stays readable."""

    def _pass(self, fence: Fence | None) -> None:
        check_fence(fence)
        if fence is None:
            return
        newest = self._fences.get(fence.name, 0)
        if fence.token < newest:
            raise fenced(fence.name, fence.token, newest)
        self._fences[fence.name] = fence.token

    def _now(self) -> float:
        return asyncio.get_running_loop().time()
