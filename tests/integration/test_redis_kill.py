"""A Redis that is killed, cut off or locked: what was acknowledged is there, and nothing happens twice."""

import asyncio
import os
import signal
from collections.abc import AsyncGenerator, Awaitable, Callable
from pathlib import Path

import pytest

from rubato.runtime.errors import LaunchError
from rubato.runtime.store.embedded import EmbeddedRedis
from rubato.runtime.store.redis import RedisStore
from rubato.runtime.store.store import Append, Fence, StoreUnavailable, WriteNumber
from tests.stores import packaged_program


@pytest.fixture
async def server(tmp_path: Path) -> AsyncGenerator[EmbeddedRedis]:
    # everysec puts a write off for up to 2 s, after its acknowledgement, while the disk is busy with the fsync before
    server = EmbeddedRedis(tmp_path / ("long" * 40) / "run", "always", program=packaged_program())
    await server.start()
    yield server
    await server.stop()


@pytest.fixture
async def store(server: EmbeddedRedis) -> AsyncGenerator[RedisStore]:
    store = RedisStore(server.url, "test")
    yield store
    await store.close()


class LossyLink:
    """Stands between a store and its server; each reply it is told to lose ends the connection instead."""

    def __init__(self, server: EmbeddedRedis, folder: Path) -> None:
        self._target = socket_of(server)
        self._path = folder / "lossy.sock"
        self._tail = server.url.partition("?")[2]
        self.to_lose = 0
        self.lost = 0

    async def start(self, tasks: asyncio.TaskGroup) -> str:
        listener = await asyncio.start_unix_server(self._serve, self._path)
        self.serving = tasks.create_task(self._until_cancelled(listener))
        return f"unix://{self._path}?{self._tail}"

    async def _until_cancelled(self, listener: asyncio.Server) -> None:
        async with listener:
            await listener.serve_forever()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        upstream, downstream = await asyncio.open_unix_connection(self._target)
        try:
            async with asyncio.TaskGroup() as tasks:
                forward = tasks.create_task(self._forward(reader, downstream))
                await self._answer(upstream, writer)
                forward.cancel()
        finally:
            writer.close()
            downstream.close()

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            writer.write(data)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            if self.to_lose and not data.startswith((b"+OK", b"-NOSCRIPT")):
                self.to_lose, self.lost = self.to_lose - 1, self.lost + 1
                return
            writer.write(data)


async def kill(server: EmbeddedRedis) -> None:
    os.kill(server.pid, signal.SIGKILL)
    assert await server.wait() == -signal.SIGKILL


async def test_what_was_acknowledged_survives_a_kill_and_calls_under_way_just_take_longer(server: EmbeddedRedis, store: RedisStore):
    reached = [asyncio.Event() for _ in range(4)]
    acknowledged = list[str]()
    indices, numbers = list[int](), list[int]()

    async def write(writer: int) -> None:
        fence = Fence(f"writer-{writer}", 1)
        await store.write({}, fence=fence)
        for i in range(150):
            name = f"{writer}.{i}"
            entry = Append(f"log-{writer}", i + 1, [name.encode()])
            await store.write({f"item/{name}": b"p" * 2000}, fence=fence, turn=WriteNumber(i + 1), append=entry)
            acknowledged.append(name)
            if len(acknowledged) % 350 == 0:
                reached[len(acknowledged) // 350].set()
            indices.append(await store.append("events", name.encode()))
            numbers.append(await store.increment("n"))

    async with asyncio.TaskGroup() as tasks:
        for writer in range(8):
            tasks.create_task(write(writer))
        for part in (1, 2):
            await reached[part].wait()
            await kill(server)
            await asyncio.sleep(0.3)
            await server.start()

    assert len(acknowledged) == len(set(acknowledged)) == 1200
    assert len(await store.scan("item/")) == 1200
    for writer in range(8):
        assert await store.read(f"log-{writer}", 0) == [(i + 1, f"{writer}.{i}".encode()) for i in range(150)]
    assert sorted(indices) == list(range(1, 1201))
    events = await store.read("events", 0)
    events += await store.read("events", events[-1][0])
    assert {value.decode() for _, value in events} == set(acknowledged)
    assert len(events) == 1200
    assert len(set(numbers)) == 1200
    assert await store.get("n") == b"%d" % max(numbers)


async def test_a_waiting_read_outlives_its_server(server: EmbeddedRedis, store: RedisStore):
    async with asyncio.timeout(30), asyncio.TaskGroup() as tasks:
        reader = tasks.create_task(store.read("s", 0, wait_s=30.0))
        await asyncio.sleep(0.1)
        await kill(server)
        await server.start()
        await store.append("s", b"after")

    assert reader.result() == [(1, b"after")]


async def test_a_half_written_append_only_file_loads(server: EmbeddedRedis, store: RedisStore, tmp_path: Path):
    await store.write({"k": b"kept"})
    await store.write({"cut": b"x" * 1000})
    await kill(server)
    (file,) = tmp_path.rglob("appendonly.aof")
    with file.open("r+b") as content:
        content.truncate(file.stat().st_size - 500)

    await server.start()

    assert await store.get("k") == b"kept"
    assert await store.get("cut") is None
    await store.write({"cut": b"again"})
    assert await store.get("cut") == b"again"


async def test_a_change_whose_reply_is_lost_is_made_once_and_answered_truly(server: EmbeddedRedis, tmp_path: Path):
    async with asyncio.TaskGroup() as tasks:
        link = LossyLink(server, tmp_path)
        store = RedisStore(await link.start(tasks), "test")

        async def losing(call: Callable[[], Awaitable[object]]) -> object:
            link.to_lose = 1
            answer = await call()
            assert link.to_lose == 0
            return answer

        fence = Fence("buffer", 1)
        await store.write({}, fence=fence)
        answers = [
            await losing(lambda: store.append("s", b"1")),
            await losing(lambda: store.increment("n")),
            await losing(lambda: store.lease("l", 1, b"", 60.0)),
            await losing(lambda: store.release("l", 1)),
            await losing(lambda: store.write({"a": b"1"}, fence=fence, turn=WriteNumber(1), append=Append("e", 1, [b"x"]))),
            await losing(lambda: store.write({"a": b"2"}, fence=fence, turn=WriteNumber(2), append=Append("e", 2, [b"y"]))),
        ]
        after = (await store.append("s", b"2"), await store.increment("n"))
        ended = await store.read("e", 0)
        await store.close()
        link.serving.cancel()

        assert answers == [1, 1, True, True, None, None]
        assert after == (2, 2)
        assert ended == [(1, b"x"), (2, b"y")]
        assert link.lost == 6


async def test_a_wrong_password_is_told_in_one_sentence(server: EmbeddedRedis):
    store = RedisStore(server.url.partition("?")[0] + "?password=wrong", "test")

    with pytest.raises(StoreUnavailable) as told:
        await store.get("k")

    await store.close()
    path = server.url.partition("?")[0]
    assert str(told.value) == (f"{path} refused the password. Set state.url with one, or leave state.url out to use the embedded server.")


async def test_no_password_where_one_is_needed_is_told_alike(server: EmbeddedRedis):
    store = RedisStore(server.url.partition("?")[0], "test")

    with pytest.raises(StoreUnavailable, match="refused the password"):
        await store.get("k")

    await store.close()


async def test_a_server_that_is_nowhere_is_named_without_its_password():
    store = RedisStore("redis://:secret@127.0.0.1:1/0", "test", patience_s=0.1)

    with pytest.raises(StoreUnavailable, match=r"redis://127\.0\.0\.1:1/0 could not be reached.*Start that server") as told:
        await store.get("k")

    await store.close()
    assert "secret" not in str(told.value)


async def test_the_next_embedded_server_finds_the_state_and_leaves_nothing_private_behind(tmp_path: Path):
    first = EmbeddedRedis(tmp_path, "always", program=packaged_program())
    store = RedisStore(await first.start(), "test")
    await store.write({"k": b"kept"})
    await store.close()
    await first.stop()

    second = EmbeddedRedis(tmp_path, program=packaged_program())
    store = RedisStore(await second.start(), "test")
    private = socket_of(second).parent
    found = await store.get("k")
    modes = [path.stat().st_mode & 0o777 for path in (private, private / "redis.conf", private / "redis.sock")]
    await store.close()
    await second.stop()

    assert found == b"kept"
    assert modes == [0o700, 0o600, 0o600]
    assert not private.exists()
    assert second.describe() == "embedded redis 6.2.14 (private socket, for development)"


def socket_of(server: EmbeddedRedis) -> Path:
    return Path(server.url.partition("://")[2].partition("?")[0])


async def test_a_server_that_fails_to_start_again_keeps_its_address_for_the_next_try(server: EmbeddedRedis, store: RedisStore):
    await store.write({"a": b"1"})
    url, program = server.url, server._program
    await kill(server)

    server._program = Path("/bin/false")
    with pytest.raises(LaunchError, match="ended with code 1 as it started"):
        await server.start()
    server._program = program

    assert await server.start() == url
    assert await store.get("a") == b"1"
