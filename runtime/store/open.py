"""Opens the store that a URL names."""

from runtime.store.store import Store


def open_store(url: str, run_id: str, *, patience_s: float = 20.0) -> Store:
    """`memory://` is a store of this process alone; anything else is a Redis or Valkey server.

    Nothing is contacted yet. `patience_s` bounds how long each call waits for a server that is away.
    """
    if url.startswith("memory://"):
        from runtime.store.memory import MemoryStore

        return MemoryStore()
    from runtime.store.redis import RedisStore

    return RedisStore(url, run_id, patience_s=patience_s)
