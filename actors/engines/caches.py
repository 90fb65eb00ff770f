"""KV caches that change engines: kept where they were computed until the engine that goes on has fetched them, part by part."""

import asyncio
from typing import TYPE_CHECKING

from actors.engines.engine import Cache
from actors.messages.generation import CachePart, FetchCache
from bus.errors import AskFailed
from bus.message import Buffer

if TYPE_CHECKING:
    from runtime.courier import Ref

PART_BYTES = 2 << 20
"""Size of a part: half of what a link may have under way, so that other messages pass between them."""

PART_S = 12.0
"""Where a part does not come within this, the cache is computed again."""


class Caches:
    """Of one engine. Bounded: where it is full a new one is not kept, since the oldest are the next to be fetched."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._kept: dict[tuple[str, int], Cache] = {}
        self.link_bytes_s = 0.0
        """What the last cache that came here travelled at; 0 before there was one."""

    def keep(self, request_id: str, cache: Cache, epoch: int = 0) -> None:
        """`epoch` is of the move that it is for; 0 where it is handed over."""
        key = (request_id, epoch)
        if len(self._kept) < self._most or key in self._kept:
            self._kept[key] = cache

    def forget(self) -> None:
        """New weights: nobody can use what is kept, nor will who went away without it."""
        self._kept.clear()

    def take(self, request_id: str, epoch: int = 0) -> Cache | None:
        """It is kept no more."""
        return self._kept.pop((request_id, epoch), None)

    def give(self, asked: FetchCache) -> CachePart:
        """The answer to an engine that asks. With its last part a cache is kept no more."""
        cache, end = self._kept.get((asked.request_id, asked.epoch)), asked.offset + PART_BYTES
        if cache is None:
            return CachePart(Buffer(b""))
        if end >= len(cache.data):
            self.take(asked.request_id, asked.epoch)
        return CachePart(
            Buffer(cache.data[asked.offset : end]), len(cache.data), cache.version, cache.shape, cache.dtype
        )

    async def fetch(self, source: "Ref", request_id: str, epoch: int = 0) -> Cache | None:
        """The whole cache; None where it is gone, or not the same any more, or its engine is gone."""
        loop, data = asyncio.get_running_loop(), bytearray()
        began, whole = loop.time(), None
        while True:
            try:
                part = await source.ask(FetchCache(request_id, epoch, len(data)), timeout=PART_S, retry=False)
            except AskFailed:
                return None
            form = part.size_bytes, part.version, part.shape, part.dtype
            if not len(part.data) or form != (whole := whole or form):  # another one took its place meanwhile
                return None
            data += part.data.data
            if len(data) >= part.size_bytes:
                self.link_bytes_s = len(data) / max(loop.time() - began, 1e-6)
                return Cache(part.version, part.shape, part.dtype, memoryview(data).toreadonly())
