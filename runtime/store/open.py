"""Opens the store that a state URL names."""

from urllib.parse import urlsplit

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

        _check(url)
        return RedisStore(url, run_id, patience_s=patience_s)
    scheme, found, _ = url.partition("://")  # no more of it is shown: it may hold a password
    said = f"starts with {scheme}://" if found else "names no protocol"
    raise StoreError(f"state.url {said}; write one of {', '.join(REDIS_SCHEMES)} and the server's address.")


def _check(url: str) -> None:
    """Raises StoreError for an address that redis-py would stumble over."""
    try:
        parts = urlsplit(url)
        _ = parts.port if parts.scheme != "unix" else 0  # the password of a socket's URL is a parameter
    except ValueError as error:
        raise StoreError(
            f"state.url names no server: {str(error).split(' as ')[0]}. Write redis://HOST:PORT."
        ) from None
