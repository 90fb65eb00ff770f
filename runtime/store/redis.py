"""RedisStore: the store over a Redis or Valkey server; every method is one Lua script of `scripts/`, or one command.

RedisLink is how they reach it: it survives a server that restarts or fails over, and applies each change once however often it is sent.
"""

import asyncio
import hashlib
import re
import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import cache
from itertools import count
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, cast
from urllib.parse import urlsplit

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import (
    AuthenticationError,
    InvalidResponse,
    NoPermissionError,
    NoScriptError,
    OutOfMemoryError,
    ReadOnlyError,
    ResponseError,
    TryAgainError,
)
from redis.exceptions import ConnectionError as LinkError
from redis.exceptions import TimeoutError as LinkTimeout

from rubato.runtime.store.store import (
    READ_LIMIT,
    Append,
    Fence,
    Lease,
    StoreError,
    StoreFull,
    StoreUnavailable,
    WriteNumber,
    check_integer,
    check_ttl,
    check_write,
    fenced,
    forgotten,
    not_a_number,
)

Figures = Mapping[str, object]
"""What a server answers to INFO, by field."""

Argument = str | bytes | int

Reply = Any
"""Result of redis-py: int, bytes or lists of them; the calling line knows which, and the next one says so."""

SCHEMES = ("redis://", "rediss://", "unix://", "redis+sentinel://", "rediss+sentinel://")

SENTINELS = SCHEMES[3:]

PATIENCE_S = 20.0
"""A killed server is back within a second or two; a failover takes ten."""

MAX_CALLS = 16
"""Calls under way at once, each on its own connection; further ones wait their turn."""

MAX_READERS = 64
"""Reads that block at once, each on its own connection; further ones wait their turn."""

CONNECT_S = 3.0

ROOM_S = 2.0
"""A server without room is reported after this long: waiting longer within one call would only hide it. One without a replica is
waited for as one that is away, since replicas take seconds to follow the next master."""

REPLICA_S = 1.0
"""So long a write waits for a replica, before the master is looked for anew."""

NO_ROOM = re.compile(r"\b(OOM|MISCONF|NOREPLICAS)\b")
"""How a server says, also from inside a script, that it refuses writes for want of memory, of a disk that takes them, or of a replica."""

REPLY_S = 10.0
"""Longer than a server stalls when its disk is busy, short enough to notice a host that vanished."""

BLOCK_S = 4.0
"""A blocking read is renewed after this long; it must stay below REPLY_S."""

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.02, 0.5
"""Back-off between attempts doubles from the first to the longest."""

MIN_REPLICAS = "min_slaves_good_slaves"
"""Replicas that keep up, as a server tells of which `min-replicas-to-write` is set."""

SCRIPTS = Path(__file__).parent / "scripts"

TEMPORARY = (LinkError, LinkTimeout, ReadOnlyError, TryAgainError, OSError)
"""Worth another attempt: gone, restarting, loading its file, or just failed over."""

REFUSALS = (AuthenticationError, NoPermissionError)
"""No attempt will do better."""

CODES = frozenset({"FENCED", "FORGOTTEN", "NOTANUMBER"})


class Rejected(Exception):
    """A script answered with an error code of ours and a number; the caller turns it into the contract's error."""

    def __init__(self, code: str, number: int) -> None:
        super().__init__(code, number)
        self.code, self.number = code, number


class Script(NamedTuple):
    text: str
    digest: str
    """SHA-1 of the text, which is all that Redis needs once it has been told."""


@cache
def script(*names: str) -> Script:
    """`scripts/{name}.lua` behind the parts it builds upon; read from disk once per process."""
    text = "\n".join((SCRIPTS / f"{name}.lua").read_text() for name in names)
    return Script(text, hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest())


class RedisLink:
    """One process's connections to the Redis at `url`, for the run `run_id`.

    Every call is attempted again, with back-off, for up to `patience_s` while the server can't be reached; then StoreUnavailable.
    Where it is `replicated`, a change that `once` makes has reached a replica when it returns: a master that was cut off acknowledges none.
    """

    def __init__(self, url: str, run_id: str, *, patience_s: float = PATIENCE_S, replicated: bool = False) -> None:
        if not run_id or set(run_id) & set("{}"):
            raise ValueError(f"a run id is not empty and has no braces, got {run_id!r}")
        self.url = checked(url)
        self._prefix = f"rubato:{{{run_id}}}"
        self._patience_s = patience_s
        self._acknowledged = self._replicated if replicated else self._command
        self._redis = _connect(url)
        self._client = secrets.token_hex(6)
        self._numbers, self._new_slots = count(1), count(1)
        self._free_slots: list[int] = []
        self._calls, self._readers = asyncio.Semaphore(MAX_CALLS), asyncio.Semaphore(MAX_READERS)

    def key(self, *parts: str) -> str:
        """A key of this run; all of them share one hash slot."""
        return ":".join((self._prefix, *parts))

    async def ask(self, what: Script, keys: Sequence[str], *args: Argument) -> Reply:
        """Run a script that may safely run twice: one that only reads, or whose second run changes nothing more."""
        async with self._calls:
            return await self._attempts(lambda: self._evaluate(self._command, what, keys, args))

    async def once(self, what: Script, keys: Sequence[str], *args: Argument) -> Reply:
        """Run a script built upon once.lua: it takes effect exactly once, though the reply may be lost and it be sent again."""
        async with self._calls, self._slot() as slot:
            operation = self.key("op", self._client, str(slot))
            numbered = (next(self._numbers), *args)
            return await self._attempts(lambda: self._evaluate(self._acknowledged, what, (operation, *keys), numbered))

    async def fields(self, key: str, names: Sequence[str]) -> list[bytes | None]:
        """Fields of a hash, in their order."""
        async with self._calls:
            return cast("list[bytes | None]", await self._attempts(lambda: self._command("HMGET", key, *names)))

    async def grown(self, stream: str, after: int, wait_s: float) -> bool:
        """Whether a stream has an entry with an index above `after` within `wait_s`; returns once it has."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + wait_s
        async with self._readers:
            while (left := deadline - loop.time()) > 0:
                block_ms = max(1, round(1000 * min(left, BLOCK_S)))
                wait = ("XREAD", "COUNT", 1, "BLOCK", block_ms, "STREAMS", stream, f"0-{after}")
                if await self._attempts(lambda wait=wait: self._command(*wait)):
                    return True
        return False

    async def version(self) -> str:
        """`redis 6.2.14` or `valkey 8.0.2`; a single attempt, so that a wrong address is told at once."""
        info = await self.figures()
        if "valkey_version" in info:
            return f"valkey {info['valkey_version']}"
        return f"redis {info.get('redis_version', 'of unknown version')}"

    async def figures(self, *, budget_s: float | None = 0.0) -> Figures:
        """What the server says of itself (INFO); a single attempt, unless there is a budget, or None, which is that of all calls."""
        return cast("Figures", await self._attempts(lambda: self._command("INFO"), budget_s=budget_s))

    async def full(self) -> str:
        """Why the server takes no more writes, in a sentence; empty while it does."""
        figures = await self.figures()
        is_replicated = self._acknowledged == self._replicated or MIN_REPLICAS in figures
        if figures.get("rdb_last_bgsave_status") != "err" and not is_replicated:
            return _refusals().full(self.url, figures)
        try:  # whether a failed snapshot, or too few replicas, make it refuse writes, it does not say
            await self._attempts(lambda: self._acknowledged("SET", self.key("room"), "", "PX", 1), budget_s=0.0)
        except StoreFull as error:
            return str(error)
        return _refusals().full(self.url, figures)

    async def close(self) -> None:
        await self._redis.aclose()

    @asynccontextmanager
    async def _slot(self) -> AsyncGenerator[int]:
        """A slot for one numbered call. After a failure its call may still be on the way, so the slot is never used again."""
        slot = self._free_slots.pop() if self._free_slots else next(self._new_slots)
        try:
            yield slot
        except Rejected:
            self._free_slots.append(slot)
            raise
        self._free_slots.append(slot)

    async def _attempts(self, call: Callable[[], Awaitable[Reply]], *, budget_s: float | None = None) -> Reply:
        loop = asyncio.get_running_loop()
        began, pause_s = loop.time(), FIRST_PAUSE_S
        budget_s = self._patience_s if budget_s is None else budget_s
        task = asyncio.current_task()
        cancelled = task.cancelling() if task else 0
        while True:
            try:
                reply = await call()
                honour(task, cancelled)
                return reply
            except (*TEMPORARY, *REFUSALS) as error:
                if isinstance(error, REFUSALS) or isinstance(error.__cause__, REFUSALS):  # redis-py may wrap the latter
                    raise StoreUnavailable(_refusals().refused(self.url, error)) from error
                if loop.time() - began + pause_s > budget_s:
                    raise StoreUnavailable(_refusals().away(self.url, loop.time() - began, error)) from error
            except InvalidResponse as error:
                raise StoreUnavailable(_refusals().stranger(self.url)) from error
            except ResponseError as error:
                found = NO_ROOM.search(str(error))
                if not isinstance(error, OutOfMemoryError) and not found:
                    raise _rejection(self.url, error) from error
                want = found[1] if found else "OOM"
                room_s = budget_s if want == "NOREPLICAS" else min(budget_s, ROOM_S)
                if loop.time() - began + pause_s > room_s:
                    raise StoreFull(_refusals().out_of_room(self.url, want)) from error
                if want == "NOREPLICAS":  # another may be the master by now, which only new connections are led to
                    await self._redis.connection_pool.disconnect(inuse_connections=False)
            honour(task, cancelled)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    async def _evaluate(
        self, command: Callable[..., Awaitable[Reply]], what: Script, keys: Sequence[str], args: Sequence[Argument]
    ) -> Reply:
        try:
            return await command("EVALSHA", what.digest, len(keys), *keys, *args)
        except NoScriptError:  # a server that restarted, or never saw it
            return await command("EVAL", what.text, len(keys), *keys, *args)

    async def _command(self, *words: Argument) -> Reply:
        send = cast("Callable[..., Awaitable[Reply]]", self._redis.execute_command)  # pyright: ignore[reportUnknownMemberType]
        async with asyncio.timeout(REPLY_S):
            return await send(*words)

    async def _replicated(self, *words: Argument) -> Reply:
        """The same, once a replica has all that this connection wrote."""
        async with asyncio.timeout(REPLY_S), self._redis.pipeline(transaction=False) as both:
            both.execute_command(*words)  # pyright: ignore[reportUnknownMemberType]
            both.execute_command("WAIT", 1, round(1000 * REPLICA_S))  # pyright: ignore[reportUnknownMemberType]
            replies: list[Reply] = await both.execute(raise_on_error=False)
        if failed := [reply for reply in replies if isinstance(reply, Exception)]:
            raise failed[0]
        if not replies[1]:
            raise ResponseError("NOREPLICAS none acknowledged it")
        return replies[0]


def _refusals() -> ModuleType:
    from rubato.runtime.store import refusals  # of no use while all is well

    return refusals


def honour(task: "asyncio.Task[Any] | None", before: int) -> None:
    """redis-py loses a cancellation that meets a reply in the same tick; raise it here, or its task would never end."""
    if task is not None and task.cancelling() > before:
        raise asyncio.CancelledError


def _connect(url: str) -> "Redis":
    options: dict[str, Any] = {
        "protocol": 2,
        "retry": Retry(NoBackoff(), 0),
        "socket_connect_timeout": CONNECT_S,
        "socket_timeout": None,  # redis-py would use wait_for, which in Python 3.11 loses a cancellation
        "max_connections": MAX_CALLS + MAX_READERS + 1,
    }
    if url.startswith(SENTINELS):
        from rubato.runtime.store import sentinel  # of no use to most

        return sentinel.connect(url, **options)
    return Redis.from_url(url, **options)  # pyright: ignore[reportUnknownMemberType]


def checked(url: str) -> str:
    """The URL without secrets. Raises StoreError for one that redis-py would stumble over."""
    if not url.startswith(SCHEMES):
        raise StoreError(_refusals().scheme(url, SCHEMES))
    if url.startswith(SENTINELS):
        from rubato.runtime.store.sentinel import parse

        return parse(url).shown
    try:
        parts = urlsplit(url)
        _ = parts.port if parts.scheme != "unix" else 0  # the password of a socket's URL is a parameter
    except ValueError as error:
        raise StoreError(f"state.url names no server: {str(error).split(' as ')[0]}. Write redis://HOST:PORT.") from None
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def _rejection(url: str, error: ResponseError) -> Exception:
    """Our scripts answer `CODE number`; anything else is the server's own complaint."""
    code, _, rest = str(error).partition(" ")
    number = rest.split(" ", 1)[0]
    if code in CODES and number.isdigit():
        return Rejected(code, int(number))
    return StoreError(f"{url} refused a command: {error}")


class RedisStore:
    """A `Store` for the run `run_id` at `url`, one of SCHEMES with its password inside; `replicated` as `state.durability` has it.

    A server that is killed and comes back within `patience_s` is survived by every call; each change is still made exactly once.
    Nothing is contacted yet. Raises StoreError for a URL of no such server.
    """

    def __init__(self, url: str, run_id: str, *, patience_s: float = PATIENCE_S, replicated: bool = False) -> None:
        self._link = link = RedisLink(url, run_id, patience_s=patience_s, replicated=replicated)
        self._keys, self._index, self._fences = link.key("keys"), link.key("index"), link.key("fences")
        self._streams = link.key("streams")
        self._lease_keys = (link.key("lease", "tokens"), link.key("lease", "values"), link.key("lease", "until"))

    async def version(self) -> str:
        """Name and version of the server, from a single attempt."""
        return await self._link.version()

    async def figures(self) -> Figures:
        """What the server says of itself (INFO)."""
        return await self._link.figures(budget_s=None)

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
        if not found and wait_s > 0 and await self._link.grown(key, after, wait_s):
            found = await self._read(key, after)
        return found

    async def lease(self, name: str, token: int, value: bytes, ttl_s: float) -> bool:
        check_integer("token", token, least=0)
        check_ttl(ttl_s)
        ttl_us = max(1, round(ttl_s * 1e6))
        return bool(await self._link.ask(script("room", "lease"), self._lease_keys, name, token, value, ttl_us))

    async def release(self, name: str, token: int) -> bool:
        return bool(await self._link.once(script("once", "room", "release"), self._lease_keys, name, token))

    async def held(self, name: str) -> Lease | None:
        found = cast("list[Reply]", await self._link.ask(script("held"), self._lease_keys, name))
        return Lease(int(found[0]), cast("bytes", found[1]), int(found[2]) / 1e6) if found else None

    async def leases(self, prefix: str) -> dict[str, Lease]:
        flat = cast("list[Reply]", await self._link.ask(script("leases"), self._lease_keys, prefix))
        found = {
            cast("bytes", flat[at]).decode(): Lease(int(flat[at + 1]), cast("bytes", flat[at + 2]), int(flat[at + 3]) / 1e6)
            for at in range(0, len(flat), 4)
        }
        return dict(sorted(found.items()))

    async def holders(self, prefix: str) -> dict[str, int]:
        flat = cast("list[bytes]", await self._link.ask(script("holders"), self._lease_keys, prefix))
        return {name.decode(): int(token) for name, token in sorted(zip(flat[::2], flat[1::2], strict=True))}

    async def close(self) -> None:
        await self._link.close()

    async def _read(self, key: str, after: int) -> list[tuple[int, bytes]]:
        flat = cast("list[bytes]", await self._link.ask(script("read"), (key,), f"0-{after + 1}", READ_LIMIT))
        return [(index_of(entry), value) for entry, value in zip(flat[::2], flat[1::2], strict=True)]


def index_of(entry: bytes) -> int:
    """Stream entries have the ids `0-<index>`."""
    return int(entry.partition(b"-")[2])
