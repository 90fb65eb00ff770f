"""The Store as a server with clients: latency, outages, lost replies, and a restart that loses its newest second."""

import asyncio
import copy
import itertools
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from rubato.runtime.memory import MemoryStore
from rubato.runtime.store.store import Append, Fence, Lease, StoreUnavailable, WriteNumber
from rubato.sim.simtest.process import ActorProcess

ResultT = TypeVar("ResultT")

RETRY_S = (0.02, 0.5)
"""As RedisLink: the pause between attempts doubles from the first to the second."""

LOSS_S = 1.0
"""A restart that loses anything loses no more than this of what was acknowledged."""

Reached = Callable[[str, tuple[Any, ...]], None]
"""Hears of a method and its arguments just before it takes effect."""
Applied = Callable[[str, str, tuple[Any, ...], Any], None]
"""Hears of (process, method, arguments, result) of everything that took effect."""


class State(MemoryStore):
    """What a restart takes back, answers that were kept for callers who did not get them included."""

    def __init__(self) -> None:
        super().__init__()
        self.told: dict[int, Any] = {}


class StoreServer:
    """The state and its faults."""

    def __init__(self, seed: int, *, latency_s: float, patience_s: float, durable: bool, reached: Reached, applied: Applied) -> None:
        self.state = State()
        self.rng = random.Random(f"{seed}/store")
        self.latency_s, self.patience_s, self.durable = latency_s, patience_s, durable
        self.reached, self.applied = reached, applied
        self.is_up = True
        self.num_starts = self.num_losses = 0
        self.lose_replies = 0
        """Replies that get lost after their call took effect, from the next one on."""
        self.forget_scripts = 0
        """Calls that need a second round trip because the script cache is empty."""
        self.slow_until = 0.0
        self._readers: dict[asyncio.Timeout, None] = {}
        """In the order they came: a set's order is that of addresses, and a seed must replay."""
        self._saved: State | None = None
        self._numbers = itertools.count(1)

    def begin_window(self) -> None:
        """What is written from here on is lost by the next restart, unless every write is durable."""
        self._saved = None if self.durable else copied(self.state)

    def crash(self) -> None:
        """The server dies. Its readers are cut off."""
        self.is_up = False
        if self._saved is not None:
            self.state, self._saved = self._saved, None
            self.num_losses += 1
        readers, self._readers = self._readers, {}
        for scope in readers:
            scope.reschedule(0.0)

    def restart(self) -> None:
        self.is_up = True
        self.num_starts += 1
        self.state.counters.life = self.num_starts

    def next_number(self) -> int:
        """Names one call, over all its attempts."""
        return next(self._numbers)

    def delay_s(self) -> float:
        """One way."""
        slow = 50.0 if asyncio.get_running_loop().time() < self.slow_until else 1.0
        return slow * self.rng.uniform(0.0, self.latency_s)

    async def grown(self, stream: str, after: int, wait_s: float) -> None:
        """Wait for an entry, for as long as the server is up."""
        async with asyncio.timeout(None) as scope:
            self._readers[scope] = None
            try:
                await self.state.read(stream, after, wait_s=wait_s)
            finally:
                self._readers.pop(scope, None)


def copied(state: State) -> State:
    """A deep copy that shares what is immutable; waiters stay with the original."""
    events = {id(stream.grew): asyncio.Event() for stream in state._streams.values()}  # pyright: ignore[reportPrivateUsage]
    return copy.deepcopy(state, dict(events))


class StoreClient:
    """A `Store` as one process sees it: every call is attempted again while the server is away, and takes effect once."""

    def __init__(self, server: StoreServer, process: ActorProcess) -> None:
        self._server, self._process = server, process

    async def get(self, key: str) -> bytes | None:
        return await self._call("get", key)

    async def scan(self, prefix: str) -> dict[str, bytes]:
        return await self._call("scan", prefix)

    async def fenced(self, name: str) -> tuple[int, int]:
        return await self._call("fenced", name)

    async def fetch(self, keys: Sequence[str]) -> list[bytes | None]:
        return await self._call("fetch", tuple(keys))

    async def write(
        self,
        changes: Mapping[str, bytes | None],
        *,
        fence: Fence | None = None,
        turn: WriteNumber | None = None,
        append: Append | None = None,
    ) -> None:
        await self._call("write", dict(changes), fence=fence, turn=turn, append=append)

    async def increment(self, key: str, *, at_least: int = 0) -> int:
        return await self._call("increment", key, at_least=at_least)

    async def append(self, stream: str, value: bytes, *, limit: int = 10_000) -> int:
        return await self._call("append", stream, value, limit=limit)

    async def read(self, stream: str, after: int, *, wait_s: float = 0.0) -> list[tuple[int, bytes]]:
        loop = asyncio.get_running_loop()
        until = loop.time() + wait_s
        found = await self._call("read", stream, after)
        while not found and (left := until - loop.time()) > 0:
            with suppress(TimeoutError):  # the server went away: the next attempt waits for it
                await self._server.grown(stream, after, left)
            found = await self._call("read", stream, after)
        return found

    async def lease(self, name: str, token: int, value: bytes, ttl_s: float) -> bool:
        return await self._call("lease", name, token, value, ttl_s)

    async def release(self, name: str, token: int) -> bool:
        return await self._call("release", name, token)

    async def held(self, name: str) -> Lease | None:
        return await self._call("held", name)

    async def leases(self, prefix: str) -> dict[str, Lease]:
        return await self._call("leases", prefix)

    async def holders(self, prefix: str) -> dict[str, int]:
        return await self._call("holders", prefix)

    async def full(self) -> str:
        return ""

    async def close(self) -> None:
        """Nothing is held."""

    async def _call(self, method: str, *args: Any, **options: Any) -> Any:
        server, loop = self._server, asyncio.get_running_loop()
        began, pause_s = loop.time(), RETRY_S[0]
        number = server.next_number()
        while True:
            try:
                await self._travel()
                if server.forget_scripts:
                    server.forget_scripts -= 1
                    await self._travel()
                state = server.state
                value = await self._apply(number, method, args, options)
                await self._reply(state, number, value)
            except ConnectionError:
                if loop.time() - began + pause_s > server.patience_s:
                    raise StoreUnavailable(f"the simulated store was away for {server.patience_s:g} s") from None
            else:
                return value
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, RETRY_S[1])

    async def _apply(self, number: int, method: str, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Takes effect at one instant, and once however often it is sent."""
        server = self._server
        self._process.check_alive()
        if number in server.state.told:
            return server.state.told[number]
        server.reached(method, args)
        work: Awaitable[Any] = getattr(server.state, method)(*args, **options)
        value = await work
        server.applied(self._process.name, method, (*args, *options.values()), value)
        return value

    async def _reply(self, state: State, number: int, value: Any) -> None:
        """An answer that does not arrive is kept beside what it tells of: a server that loses the one loses the other."""
        server = self._server
        if server.lose_replies:
            server.lose_replies -= 1
            state.told[number] = value
            raise ConnectionError
        try:
            await self._travel()
        except ConnectionError:
            state.told[number] = value
            raise
        state.told.pop(number, None)

    async def _travel(self) -> None:
        """One way over the wire. Raises ConnectionError where there is no server at its end."""
        delay_s = self._server.delay_s()
        if delay_s:
            await asyncio.sleep(delay_s)
        if not self._server.is_up:
            raise ConnectionError
