"""Opens the store that a state URL names."""

from runtime.store.errors import StoreError
from runtime.store.store import Store

REDIS_SCHEMES = ("redis://", "rediss://", "unix://")


def open_store(url: str, run_id: str, *, patience_s: float = 20.0) -> Store:
    """`memory://` is a new store of this process alone; `redis://`, `rediss://` and `unix://` name a Redis or Valkey server.

    Nothing is contacted yet. `patience_s` bounds how long each call waits for a server that is away. Raises StoreError for
    any other URL.
    """
    if url == "memory://":
        from runtime.store.memory import MemoryStore

        return MemoryStore()
    if url.startswith(REDIS_SCHEMES):
        from runtime.store.redis import RedisStore

        return RedisStore(url, run_id, patience_s=patience_s)
    scheme, found, _ = url.partition("://")  # no more of it is shown: it may hold a password
    said = f"starts with {scheme}://" if found else "names no protocol"
    raise StoreError(f"state.url {said}; write one of {', '.join(REDIS_SCHEMES)} and the server's address.")
