"""A server started as the launcher does it (a user of its own, an append-only file) reads back everything after a SIGKILL."""

import asyncio
import os
import shutil
import signal
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from runtime.store.embedded import EmbeddedRedis
from runtime.store.errors import Fenced, StaleEpoch
from runtime.store.redis import RedisStore
from runtime.store.servers import installed_server
from runtime.store.store import Fence
from runtime.store.workset import Counts, Item
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
    """Every kind of write that a Store and its WorkSets know, in each of their outcomes that leave something behind."""
    await store.write({"a/1": b"one", "a/2": b"two", "b": b"\x00\xff", "gone": b"x"}, fence=Fence("buffer", 7))
    await store.write({"gone": None, "a/2": b"second"}, fence=Fence("buffer", 7))
    await store.compare_and_set("cas", None, b"first")
    await store.compare_and_set("cas", b"first", b"then", fence=Fence("other", 3))
    await store.increment("n")
    await store.increment("n", at_least=41)
    for i in range(5):
        await store.append("events", b"%d" % i, limit=3)
    await store.lease("actor/a-1", 5, b"lives", 600.0)
    await store.lease("actor/b-1", 6, b"left", 600.0)
    await store.release("actor/b-1", 6)
    samples = store.workset("samples")
    await samples.new_epoch(4)
    for group in ("done", "bound", "ready", "held", "dropped", "old"):
        for member in range(2):
            await samples.put(
                Item(f"{group}.{member}", group, 0 if group == "old" else 5, b"p" * 3000, f"note {group}".encode())
            )
    await samples.end("failed.0", "failed", "failed", b"note")
    for group in ("done", "bound", "ready", "old"):
        await samples.seal(group, "trained")
    await samples.put(Item("ready.9", "ready", 5, b"", b"late"))
    await samples.discard("dropped", "unused")
    await samples.discard("ready", "unused")
    await samples.put(Item("again.0", "again", 6, b"p"))
    await samples.seal("again", "zero_spread")
    await samples.claim(1, 3, 1, 4)
    await samples.claim(1, 3, 2, 4)
    await samples.commit(1, 4)
    await samples.trim(2)


async def seen(store: RedisStore) -> dict[str, object]:
    """Everything that can be read without changing it; a step that is bound is handed out again."""
    samples = store.workset("samples")
    groups = ("done", "bound", "ready", "held", "dropped", "old", "again", "failed")
    return {
        "keys": await store.scan(""),
        "single": [await store.get(key) for key in ("a/1", "a/2", "b", "gone", "cas", "n")],
        "events": await store.read("events", 0),
        "leases": {name: lease[:2] for name, lease in (await store.leases("")).items()},
        "counts": await samples.counts(),
        "ended": await samples.ended(0),
        "members": {group: await samples.members(group) for group in groups},
        "bound": await samples.claim(1, 3, 2, 4),
    }


async def test_everything_that_was_written_is_read_back(server: EmbeddedRedis, store: RedisStore):
    await fill(store)
    before = await seen(store)
    ended = before["counts"].ended
    assert before["counts"] == Counts(held=2, ready=1, bound=2, ended=ended, committed=1, epoch=4, bound_steps=(2,))

    await restarted(server)

    assert await seen(store) == before
    await restarted(server)
    assert await seen(store) == before


async def test_what_guards_the_state_is_read_back_too(server: EmbeddedRedis, store: RedisStore):
    """Fences, epochs, leases' tokens, ids that were seen, and the answers kept for callers that ask again."""
    await fill(store)

    await restarted(server)

    samples = store.workset("samples")
    with pytest.raises(Fenced):
        await store.write({"a/1": b"zombie"}, fence=Fence("buffer", 6))
    with pytest.raises(Fenced):
        await store.compare_and_set("cas", b"then", b"zombie", fence=Fence("other", 2))
    with pytest.raises(StaleEpoch):
        await samples.commit(2, 3)
    assert not await store.lease("actor/b-1", 5, b"", 1.0)
    assert not await store.lease("actor/a-1", 4, b"", 1.0)
    assert await samples.put(Item("done.0", "done", 5, b"")) == "duplicate"
    assert not await samples.end("dropped.0", "dropped", "failed")
    assert await store.append("events", b"next") == 6
    assert await store.increment("n") > 41
    epoch = await samples.new_epoch()
    assert epoch > 4
    assert await samples.commit(2, epoch) == 2


@pytest.mark.parametrize("remembers", [True, False], ids=["remembers older ones", "remembers none"])
async def test_no_number_is_given_twice_by_a_server_that_forgot_its_newest(
    server: EmbeddedRedis, store: RedisStore, tmp_path: Path, remembers: bool
):
    samples = store.workset("samples")

    async def drawn() -> list[int]:
        return [await store.increment("n") for _ in range(5)] + [await samples.new_epoch() for _ in range(5)]

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
    epochs = [number for each in numbers for number in each[5:]]
    assert counts == sorted(set(counts))
    assert epochs == sorted(set(epochs))
    assert [first, numbers[0]] == (
        [[1, 2, 3, 4, 5] * 2, [6, 7, 8, 9, 10] * 2] if remembers else [[1], [1, 2, 3, 4, 5] * 2]
    )
