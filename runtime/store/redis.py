"""RedisStore: the Store on Redis 6.2 or later, or Valkey; every method is one command or one script."""

from collections.abc import Mapping

from runtime.store.errors import Fenced
from runtime.store.limits import READ_LIMIT, check_integer, check_ttl
from runtime.store.redis_client import PATIENCE_S, Client
from runtime.store.redis_workset import RedisWorkSet
from runtime.store.store import Fence, Lease


class RedisStore:
    """State of one run under `rubato:{run}:…`; the braces keep a run in one slot of a cluster.

    `append` and `increment` repeat when a reply was lost: an event may be seen twice, a number skipped.
    """

    def __init__(self, url: str, run_id: str, *, patience_s: float = PATIENCE_S) -> None:
        self._client = Client(url, patience_s=patience_s)
        self._prefix = f"rubato:{{{run_id}}}"
        self._worksets: dict[str, RedisWorkSet] = {}

    async def get(self, key: str) -> bytes | None:
        return await self._client.run(lambda redis: redis.hget(self._key("kv"), key))

    async def scan(self, prefix: str) -> dict[str, bytes]:
        pattern = "".join(f"[{c}]" if c in "*?[]" else "\\\\" if c == "\\" else c for c in prefix) + "*"

        async def all_matching(redis: "object") -> dict[str, bytes]:
            found: dict[str, bytes] = {}
            async for key, value in redis.hscan_iter(self._key("kv"), match=pattern, count=1000):  # type: ignore[attr-defined]
                found[key.decode()] = value
            return found

        found = await self._client.run(all_matching)
        return {key: found[key] for key in sorted(found) if key.startswith(prefix)}

    async def write(self, changes: Mapping[str, bytes | None], *, fence: Fence | None = None) -> None:
        sets = [(key, value) for key, value in changes.items() if value is not None]
        flat = [part for pair in sets for part in pair]
        deletes = [key for key, value in changes.items() if value is None]
        await self._fenced(fence, ["write", len(sets), *flat, *deletes])

    async def compare_and_set(
        self, key: str, expected: bytes | None, value: bytes, *, fence: Fence | None = None
    ) -> bool:
        present = "0" if expected is None else "1"
        return await self._fenced(fence, ["cas", key, present, expected or b"", value]) == 1

    async def increment(self, key: str, *, at_least: int = 0) -> int:
        check_integer("at_least", at_least)
        return int(await self._client.script("increment", [self._key("kv")], [key, at_least]))

    async def append(self, stream: str, value: bytes, *, limit: int = 10_000) -> int:
        check_integer("limit", limit, least=1)
        keys = [self._key(f"stream:{stream}"), self._key("kv")]
        return int(await self._client.script("append", keys, [f"stream:{stream}", value, limit]))

    async def read(self, stream: str, after: int, *, wait_s: float = 0.0) -> list[tuple[int, bytes]]:
        check_integer("after", after, least=0)
        key = self._key(f"stream:{stream}")
        block = {"block": max(1, int(wait_s * 1000))} if wait_s > 0 else {}
        # A cursor of 0 must not skip entry 1-0, and any other must skip all of its own millisecond: "after-0" does both.
        reply = await self._client.run(
            lambda redis: redis.xread({key: f"{after}-0"}, count=READ_LIMIT, **block), blocking=wait_s > 0
        )
        entries = _entries(reply)
        return [(int(entry.split(b"-")[0]), fields[b"v"]) for entry, fields in entries]

    async def lease(self, name: str, token: int, value: bytes, ttl_s: float) -> bool:
        check_integer("token", token, least=0)
        check_ttl(ttl_s)
        return await self._leases("lease", name, token, value, max(1, int(ttl_s * 1000))) == 1

    async def release(self, name: str, token: int) -> bool:
        return await self._leases("release", name, token, b"", 0) == 1

    async def leases(self, prefix: str) -> dict[str, Lease]:
        rows: list[list[bytes]] = await self._leases("list", prefix, 0, b"", 0)  # type: ignore[assignment]
        found = {row[0].decode(): Lease(int(row[1]), row[2], int(row[3]) / 1000) for row in rows}
        return dict(sorted(found.items()))

    def workset(self, name: str) -> RedisWorkSet:
        return self._worksets.setdefault(name, RedisWorkSet(self._client, self._key(f"ws:{name}")))

    async def close(self) -> None:
        await self._client.close()

    async def _fenced(self, fence: Fence | None, arguments: list[object]) -> int:
        if fence is not None:
            check_integer("fence token", fence.token, least=0)
        name, token = fence or ("", 0)
        done = int(
            await self._client.script("write", [self._key("kv"), self._key("fences")], [name, token, *arguments])
        )
        if done == -1:
            raise Fenced(f"{name!r} writes with token {token}, but a newer one was seen: it took over")
        return done

    async def _leases(self, verb: str, name: str, token: int, value: bytes, ttl_ms: int) -> object:
        keys = [self._key("leases"), self._key("tokens"), self._key("expiry")]
        return await self._client.script("lease", keys, [verb, name, token, value, ttl_ms])

    def _key(self, name: str) -> str:
        return f"{self._prefix}:{name}"


def _entries(reply: object) -> list[tuple[bytes, dict[bytes, bytes]]]:
    """The entries of the one stream that was asked for, whichever protocol version the client speaks."""
    if not reply:
        return []
    if isinstance(reply, dict):
        (entries,) = reply.values()  # type: ignore[misc]
        return entries[0] if entries and isinstance(entries[0], list) else entries  # type: ignore[return-value]
    return reply[0][1]  # type: ignore[index]
