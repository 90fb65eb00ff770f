"""RedisStore: the store over a Redis or Valkey server; every method is one Lua script of `scripts/`, or one command."""

from collections.abc import Mapping, Sequence
from typing import cast

from runtime.store.errors import fenced, forgotten, not_a_number
from runtime.store.redis_link import PATIENCE_S, Argument, RedisLink, Rejected, Reply, concerns, script
from runtime.store.store import READ_LIMIT, Append, Fence, Lease, WriteNumber, check_integer, check_ttl, check_write


class RedisStore:
    """A `Store` for the run `run_id` at `url` (`redis://`, `rediss://` or `unix://`, password inside).

    A server that is killed and comes back within `patience_s` is survived by every call; each change is still made exactly once.
    Nothing is contacted yet. Raises StoreError for a URL of no such server.
    """

    def __init__(self, url: str, run_id: str, *, patience_s: float = PATIENCE_S) -> None:
        self._link = link = RedisLink(url, run_id, patience_s=patience_s)
        self._keys, self._index, self._fences = link.key("keys"), link.key("index"), link.key("fences")
        self._streams = link.key("streams")
        self._lease_keys = (link.key("lease", "tokens"), link.key("lease", "values"), link.key("lease", "until"))

    async def version(self) -> str:
        """Name and version of the server, from a single attempt."""
        return await self._link.version()

    async def concerns(self) -> list[str]:
        """What may lose samples on this server, a sentence each; from a single attempt."""
        return concerns(await self._link.figures())

    async def full(self) -> str:
        return await self._link.full()

    async def get(self, key: str) -> bytes | None:
        return (await self._link.fields(self._keys, [key]))[0]

    async def scan(self, prefix: str) -> dict[str, bytes]:
        flat = cast("list[bytes]", await self._link.ask(script("scan"), (self._keys, self._index), prefix))
        return {key.decode(): value for key, value in zip(flat[::2], flat[1::2], strict=True)}

    async def fenced(self, name: str) -> tuple[int, int]:
        token, _, number = ((await self._link.fields(self._fences, [name]))[0] or b"0 0").partition(b" ")
        return int(token), int(number)

    async def fetch(self, keys: Sequence[str]) -> list[bytes | None]:
        return await self._link.fields(self._keys, keys) if keys else []

    async def write(
        self,
        changes: Mapping[str, bytes | None],
        *,
        fence: Fence | None = None,
        turn: WriteNumber | None = None,
        append: Append | None = None,
    ) -> None:
        check_write(changes, fence, turn, append)
        name, token = fence or ("", "")
        number, before = "", ""
        if turn is not None:
            number = turn.number
            before = "{} {}".format(*(turn.after or (token, number - 1)))
        flat: list[Argument] = [name, token, number, before, len(changes)]
        for key, value in changes.items():
            flat += (key, "0", b"") if value is None else (key, "1", value)
        keys = [self._keys, self._index, self._fences]
        if append is not None:
            keys += (self._streams, self._link.key("stream", append.stream))
            flat += (append.stream, append.first, append.forget, *append.entries)
        try:
            await self._link.once(script("once", "fence", "write"), keys, *flat)
        except Rejected as error:
            assert fence is not None
            refusal = forgotten if error.code == "FORGOTTEN" else fenced
            raise refusal(fence.name, fence.token, error.number) from None

    async def increment(self, key: str, *, at_least: int = 0) -> int:
        check_integer("at_least", at_least)
        try:
            keys = (self._keys, self._index, self._link.key("marks"))
            return int(await self._link.once(script("once", "room", "above", "increment"), keys, key, at_least))
        except Rejected:
            raise not_a_number(key) from None

    async def append(self, stream: str, value: bytes, *, limit: int = 10_000) -> int:
        check_integer("limit", limit, least=1)
        keys = (self._streams, self._link.key("stream", stream))
        return int(await self._link.once(script("once", "room", "append"), keys, stream, value, limit))

    async def read(self, stream: str, after: int, *, wait_s: float = 0.0) -> list[tuple[int, bytes]]:
        check_integer("after", after, least=0)
        key = self._link.key("stream", stream)
        found = await self._read(key, after)
        if not found and wait_s > 0:
            await self._link.grown(key, after, wait_s)
            found = await self._read(key, after)
        return found

    async def lease(self, name: str, token: int, value: bytes, ttl_s: float) -> bool:
        check_integer("token", token, least=0)
        check_ttl(ttl_s)
        ttl_us = max(1, round(ttl_s * 1e6))
        return bool(await self._link.ask(script("room", "lease"), self._lease_keys, name, token, value, ttl_us))

    async def release(self, name: str, token: int) -> bool:
        return bool(await self._link.once(script("once", "room", "release"), self._lease_keys, name, token))

    async def leases(self, prefix: str) -> dict[str, Lease]:
        flat = cast("list[Reply]", await self._link.ask(script("leases"), self._lease_keys, prefix))
        found = {
            cast("bytes", flat[at]).decode(): Lease(
                int(flat[at + 1]), cast("bytes", flat[at + 2]), int(flat[at + 3]) / 1e6
            )
            for at in range(0, len(flat), 4)
        }
        return dict(sorted(found.items()))

    async def close(self) -> None:
        await self._link.close()

    async def _read(self, key: str, after: int) -> list[tuple[int, bytes]]:
        flat = cast("list[bytes]", await self._link.ask(script("read"), (key,), f"0-{after + 1}", READ_LIMIT))
        return [(index_of(entry), value) for entry, value in zip(flat[::2], flat[1::2], strict=True)]


def index_of(entry: bytes) -> int:
    """Stream entries have the ids `0-<index>`."""
    return int(entry.partition(b"-")[2])
