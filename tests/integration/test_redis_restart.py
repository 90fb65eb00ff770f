"""A server started as the launcher does it (a user of its own, an append-only file) reads back everything after a SIGKILL."""

import asyncio
import os
import shutil
import signal
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from rubato.runtime.store.embedded import EmbeddedRedis, installed_server
from rubato.runtime.store.redis import RedisStore
from rubato.runtime.store.store import Append, Fence, Fenced, Forgotten, WriteNumber
from tests.stores import need_server, packaged_program

WINDOW_S = 2.0
"""What `everysec` may lose of a server that is killed."""


@pytest.fixture(params=["packaged", pytest.param("installed", marks=pytest.mark.redis)])
def program(request: pytest.FixtureRequest) -> Path:
    if request.param == "packaged":
        return packaged_program()
    return need_server(installed_server(), "no redis-server or valkey-server on the PATH")


@pytest.fixture(params=["always", "everysec"])
async def server(request: pytest.FixtureRequest, program: Path, tmp_path: Path) -> AsyncGenerator[EmbeddedRedis]:
    server = EmbeddedRedis(tmp_path / "run", request.param, program=program, sockets=tmp_path, password="a" * 32)
    await server.start()
    yield server
    await server.stop()


@pytest.fixture
async def store(server: EmbeddedRedis) -> AsyncGenerator[RedisStore]:
    store = RedisStore(server.url, "run")
    yield store
    await store.close()


async def restarted(server: EmbeddedRedis) -> None:
    """Killed once the window of its durability is over, and started again."""
    if server._durability == "everysec":
        await asyncio.sleep(WINDOW_S)
    os.kill(server.pid, signal.SIGKILL)
    assert await server.wait() == -signal.SIGKILL
    await server.start()


async def fill(store: RedisStore) -> None:
    """Every kind of write that a Store knows, in each of their outcomes that leave something behind."""
    await store.write({"a/1": b"one", "a/2": b"two", "b": b"\x00\xff", "gone": b"x"}, fence=Fence("buffer", 7))
    await store.write({"gone": None, "a/2": b"second"}, fence=Fence("buffer", 7))
    await store.write({"c": b"then"}, fence=Fence("other", 3))
    await store.increment("n")
    await store.increment("n", at_least=41)
    for i in range(5):
        await store.append("events", b"%d" % i, limit=3)
    await store.lease("actor/a-1", 5, b"lives", 600.0)
    await store.lease("actor/b-1", 6, b"left", 600.0)
    await store.release("actor/b-1", 6)
    await store.write({}, fence=Fence("samples", 4))
    for number in range(1, 6):
        ends = Append("ends", number, [b"end %d" % number], forget=1)
        await store.write({f"g/{number}": b"p" * 3000}, fence=Fence("samples", 4), turn=WriteNumber(number), append=ends)
    await store.write({}, fence=Fence("samples", 4), turn=WriteNumber(6), append=Append("ends", 4, [b"another end 4"]))


async def seen(store: RedisStore) -> dict[str, object]:
    """Everything that can be read."""
    return {
        "keys": await store.scan(""),
        "single": [await store.get(key) for key in ("a/1", "a/2", "b", "gone", "c", "n")],
        "events": await store.read("events", 0),
        "leases": {name: lease[:2] for name, lease in (await store.leases("")).items()},
        "ends": await store.read("ends", 0),
    }


async def test_everything_that_was_written_is_read_back(server: EmbeddedRedis, store: RedisStore):
    await fill(store)
    before = await seen(store)
    assert before["ends"] == [(2, b"end 2"), (3, b"end 3"), (4, b"another end 4")]

    await restarted(server)

    assert await seen(store) == before
    await restarted(server)
    assert await seen(store) == before


async def test_what_guards_the_state_is_read_back_too(server: EmbeddedRedis, store: RedisStore):
    """Fences, turns, leases' tokens, and the answers kept for callers that ask again."""
    await fill(store)

    await restarted(server)

    with pytest.raises(Fenced):
        await store.write({"a/1": b"zombie"}, fence=Fence("buffer", 6))
    with pytest.raises(Fenced):
        await store.write({"c": b"zombie"}, fence=Fence("other", 2))
    with pytest.raises(Forgotten):
        await store.write({}, fence=Fence("samples", 4), turn=WriteNumber(8))
    assert not await store.lease("actor/b-1", 5, b"", 1.0)
    assert not await store.lease("actor/a-1", 4, b"", 1.0)
    await store.write({"g/6": b"again"}, fence=Fence("samples", 4), turn=WriteNumber(6))
    assert await store.get("g/6") is None, "that write was made already"
    assert await store.append("events", b"next") == 6
    assert await store.increment("n") > 41


@pytest.mark.parametrize("remembers", [True, False], ids=["remembers older ones", "remembers none"])
async def test_no_number_is_given_twice_by_a_server_that_forgot_its_newest(
    server: EmbeddedRedis, store: RedisStore, tmp_path: Path, remembers: bool
):
    async def drawn() -> list[int]:
        return [await store.increment(name) for name in ("n", "term") for _ in range(5)]

    first = await drawn() if remembers else [await store.increment("other")]
    state, kept = server._state, tmp_path / "kept"
    shutil.copytree(state, kept)
    numbers = [await drawn()]
    for _ in range(2):
        os.kill(server.pid, signal.SIGKILL)
        await server.wait()
        shutil.rmtree(state)
        shutil.copytree(kept, state)
        await server.start()
        numbers.append(await drawn())

    counts = [number for each in numbers for number in each[:5]]
    terms = [number for each in numbers for number in each[5:]]
    assert counts == sorted(set(counts))
    assert terms == sorted(set(terms))
    assert [first, numbers[0]] == ([[1, 2, 3, 4, 5] * 2, [6, 7, 8, 9, 10] * 2] if remembers else [[1], [1, 2, 3, 4, 5] * 2])
