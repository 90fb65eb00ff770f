"""KV caches that change engines: an engine that only prefills keeps them until the one that decodes has fetched them."""

from typing import TYPE_CHECKING

from actors.engines.engine import Cache
from actors.messages.generation import FetchCache, KeptCache
from bus.codec import MAX_BODY_BYTES
from bus.errors import AskFailed
from bus.message import Buffer

if TYPE_CHECKING:
    from runtime.courier import Ref

FETCH_S = 30.0
"""A cache that does not come within this is computed again."""

GONE = KeptCache(-1, (), "", Buffer(b""))


class KeptCaches:
    """Bounded: where it is full a new one is not kept, since the oldest are the next to be fetched. Nor is one that no frame holds."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._caches: dict[str, Cache] = {}

    def keep(self, request_id: str, cache: Cache) -> None:
        if len(cache.data) <= MAX_BODY_BYTES and (len(self._caches) < self._most or request_id in self._caches):
            self._caches[request_id] = cache

    def forget(self) -> None:
        """New weights: nobody can use what is kept, nor will who went away without it."""
        self._caches.clear()

    def take(self, request_id: str) -> Cache | None:
        return self._caches.pop(request_id, None)

    def give(self, request: FetchCache) -> KeptCache:
        """The answer to an engine that asks."""
        cache = self.take(request.request_id)
        return GONE if cache is None else KeptCache(cache.version, cache.shape, cache.dtype, Buffer(cache.data))


async def fetch(source: "Ref", request_id: str) -> Cache | None:
    """None where it is gone, or its engine is."""
    try:
        kept = await source.ask(FetchCache(request_id), timeout=FETCH_S, retry=False)
    except AskFailed:
        return None
    return Cache(kept.version, kept.shape, kept.dtype, kept.data.data) if kept.shape else None
