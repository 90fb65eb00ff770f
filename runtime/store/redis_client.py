"""One patient connection to Redis or Valkey: what the server can't answer now is asked again, within a budget."""

import asyncio
from collections.abc import Awaitable, Callable
from functools import cache
from importlib import resources
from typing import Any, TypeVar
from urllib.parse import urlsplit

from redis.asyncio import BlockingConnectionPool, Redis
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, BusyLoadingError, NoScriptError, RedisError, ResponseError
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError
from redis.retry import Retry

from runtime.store.errors import StoreUnavailable

ResultT = TypeVar("ResultT")

PATIENCE_S = 20.0
"""A killed server is back within a second or two; a failover takes ten."""

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 1.0

CONNECTIONS = 8
"""Per process: calls beyond them wait for one. The server is single-threaded, so more would only queue there."""

AWAY = (RedisConnectionError, RedisTimeoutError, BusyLoadingError, OSError)


class Client:
    """Runs commands and scripts. A call whose reply was lost is made again: scripts are written so that this is harmless."""

    def __init__(self, url: str, *, patience_s: float = PATIENCE_S) -> None:
        self.url = url
        self._patience_s = patience_s
        self._redis: Any = self._connect(CONNECTIONS)
        self._blocking: Any = self._connect(1, socket_timeout=None)

    async def run(self, command: Callable[[Any], Awaitable[ResultT]], *, blocking: bool = False) -> ResultT:
        """`command(redis)`, repeated while the server is away. Raises StoreUnavailable past the budget, or at once for a bad password."""
        loop = asyncio.get_running_loop()
        deadline, pause = loop.time() + self._patience_s, FIRST_PAUSE_S
        while True:
            try:
                return await command(self._blocking if blocking else self._redis)
            except AuthenticationError as error:
                raise StoreUnavailable(self._password()) from error
            except AWAY as error:
                if loop.time() + pause > deadline:
                    raise StoreUnavailable(self._away(error)) from error
            except ResponseError as error:
                if str(error).startswith(("NOAUTH", "WRONGPASS", "NOPERM")):
                    raise StoreUnavailable(self._password()) from error
                raise
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_S)

    async def script(self, name: str, keys: list[str], args: list[Any]) -> Any:
        """EVALSHA, loading the script where the server does not know it."""
        text, sha = _script(name)

        async def call(redis: Any) -> Any:
            try:
                return await redis.evalsha(sha, len(keys), *keys, *args)
            except NoScriptError:
                return await redis.eval(text, len(keys), *keys, *args)

        return await self.run(call)

    async def close(self) -> None:
        for redis in (self._redis, self._blocking):
            try:
                await redis.aclose()
                await redis.connection_pool.disconnect()
            except RedisError:
                continue

    def _connect(self, connections: int, socket_timeout: float | None = 10.0) -> Any:
        pool = BlockingConnectionPool.from_url(
            self.url,
            max_connections=connections,
            timeout=None,
            socket_timeout=socket_timeout,
            socket_connect_timeout=3.0,
            retry=Retry(NoBackoff(), 0),
        )
        return Redis(connection_pool=pool)

    def _password(self) -> str:
        return f"{shown(self.url)} refused the password. Set state.url with one, or leave state.url out to use the embedded server."

    def _away(self, error: BaseException) -> str:
        return (
            f"{shown(self.url)} can't be reached ({error}). Start the server, correct state.url, "
            "or leave state.url out to use the embedded one."
        )


def shown(url: str) -> str:
    """`url` without its password."""
    parts = urlsplit(url)
    if parts.scheme == "unix":
        return f"unix://{parts.path}"
    host = parts.hostname or ""
    return f"{parts.scheme}://{host}:{parts.port}" if parts.port else f"{parts.scheme}://{host}"


@cache
def _script(name: str) -> tuple[str, str]:
    import hashlib

    text = resources.files("runtime.store").joinpath("scripts", f"{name}.lua").read_text()
    return text, hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()
