"""KV caches that change engines: kept where they were computed until the engine that goes on has fetched them, part by part."""

import asyncio
from typing import TYPE_CHECKING

from rubato.actors.engines.engine import Cache
from rubato.actors.messages.moves import CachePart, FetchCache
from rubato.bus.errors import AskFailed
from rubato.bus.message import Buffer
from rubato.planning.moves import Rate

if TYPE_CHECKING:
    from rubato.runtime.courier import Ref

PART_BYTES = 2 << 20
"""Size of a part: half of what a link may have under way, so that other messages pass between them."""

PARTS_AT_ONCE = 4
"""Asked for before the first of them is there, so that a link with a long way is not idle meanwhile: 8 MiB under way at most."""

PART_S = 12.0
"""Where a part does not come within this, the cache is computed again."""


class Caches:
    """Of one engine. Bounded: where it is full a new one is not kept, since the oldest are the next to be fetched."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._kept: dict[tuple[str, int], Cache] = {}
        self._fetching = 0
        self._none = asyncio.Event()
        self._look()
        self.link = Rate()
        """Of caches that come here."""

    def keep(self, request_id: str, cache: Cache, number: int = 0) -> None:
        """`number` is of the move that it is for; 0 where it is handed over."""
        key = (request_id, number)
        if len(self._kept) < self._most or key in self._kept:
            self._kept[key] = cache
            self._look()

    def forget(self) -> None:
        """Drop all caches: under new weights no engine can use them, nor will one that its request left without."""
        self._kept.clear()
        self._look()

    def take(self, request_id: str, number: int = 0) -> Cache | None:
        """It is kept no more."""
        cache = self._kept.pop((request_id, number), None)
        self._look()
        return cache

    async def gone(self) -> None:
        """Returns once none is kept here, and none is on its way here."""
        await self._none.wait()

    def _look(self) -> None:
        if self._kept or self._fetching:
            self._none.clear()
        else:
            self._none.set()

    def give(self, asked: FetchCache) -> CachePart:
        """The answer to an engine that asks. With its last part a cache is kept no more."""
        cache, end = self._kept.get((asked.request_id, asked.number)), asked.offset + PART_BYTES
        if cache is None:
            return CachePart(Buffer(b""))
        if end >= len(cache.data):
            self.take(asked.request_id, asked.number)
        return CachePart(Buffer(cache.data[asked.offset : end]), len(cache.data), cache.version, cache.shape, cache.dtype)

    async def fetch(self, source: "Ref", request_id: str, number: int = 0) -> Cache | None:
        """The whole cache; None where it is gone, or not the same any more, or its engine is gone."""
        loop, cache = asyncio.get_running_loop(), None
        began = loop.time()
        self._fetching += 1
        self._look()
        try:
            cache = await _fetched(source, request_id, number)
        except* (AskFailed, _NotThere):
            pass
        finally:
            self._fetching -= 1
            self._look()
        if cache is not None:
            self.link.saw(len(cache.data), loop.time() - began)
        return cache


class _NotThere(Exception):
    """The cache is gone, or another one has taken the place of that whose first part came."""


async def _fetched(source: "Ref", request_id: str, number: int) -> Cache:
    """The first part tells how many there are; the others are asked for in their order, `PARTS_AT_ONCE` under way.

    Raises AskFailed or _NotThere, or a group of those.
    """

    async def ask(offset: int) -> CachePart:
        part = await source.ask(FetchCache(request_id, number, offset), timeout=PART_S, retry=False)
        if not len(part.data) or len(part.data) != min(PART_BYTES, part.size_bytes - offset):
            raise _NotThere
        return part

    first = await ask(0)
    form = first.size_bytes, first.version, first.shape, first.dtype
    data, offsets = bytearray(first.size_bytes), iter(range(PART_BYTES, first.size_bytes, PART_BYTES))
    data[: len(first.data)] = first.data.data

    async def ask_in_turn() -> None:
        for offset in offsets:
            part = await ask(offset)
            if (part.size_bytes, part.version, part.shape, part.dtype) != form:
                raise _NotThere
            data[offset : offset + len(part.data)] = part.data.data

    async with asyncio.TaskGroup() as tasks:
        for _ in range(PARTS_AT_ONCE):
            tasks.create_task(ask_in_turn())
    return Cache(first.version, first.shape, first.dtype, memoryview(data).toreadonly())
