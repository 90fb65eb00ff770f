"""A Redis that may lose or has no room for what a run writes: it is said at launch, and a full one pauses the run."""

import asyncio
import signal
import subprocess
import sys
from collections.abc import AsyncGenerator, Callable, Iterator
from pathlib import Path

import pytest
from redis import Redis
from redis.exceptions import ConnectionError as NotThere

from rubato.runtime.config.sections import StateSection
from rubato.runtime.registry import LEASE_TTL_S
from rubato.runtime.store.embedded import installed_server
from rubato.runtime.store.fitness import concerns
from rubato.runtime.store.redis import RedisStore
from rubato.runtime.store.store import StoreFull, StoreUnavailable
from tests.jobs import SMALL, clean_environment, rubato, write_model
from tests.stores import need_server, packaged_program

START_S = 10.0
ROOM_MB = 2
PATIENCE_S = 90.0
"""For what a job does next on a machine with two busy cores."""


@pytest.fixture(params=["packaged", pytest.param("installed", marks=[pytest.mark.redis, pytest.mark.nightly])])
def program(request: pytest.FixtureRequest) -> Path:
    if request.param == "packaged":
        return packaged_program()
    return need_server(installed_server(), "no redis-server or valkey-server on the PATH")


@pytest.fixture
def server(program: Path, tmp_path: Path) -> Iterator[Redis]:
    """As its packages configure it: snapshots and no append-only file. A handle for its administrator."""
    state = tmp_path / "server"
    state.mkdir()
    process = subprocess.Popen(
        [program, "--port", "0", "--unixsocket", tmp_path / "redis.sock", "--dir", state, "--save", "900", "1"],
        stdout=subprocess.DEVNULL,
        cwd=tmp_path,
    )
    client = Redis(unix_socket_path=str(tmp_path / "redis.sock"))
    try:
        until(lambda: answers(client))
        client.rpush("others", *(b"x" * 1000 for _ in range(1000 * ROOM_MB)))
        yield client
    finally:
        client.close()
        process.kill()
        process.wait()


@pytest.fixture
def url(server: Redis, tmp_path: Path) -> str:
    return f"unix://{tmp_path / 'redis.sock'}"


@pytest.fixture
async def store(url: str) -> AsyncGenerator[RedisStore]:
    store = RedisStore(url, "test")
    yield store
    await store.close()


def no_memory(server: Redis) -> None:
    server.config_set("maxmemory", f"{ROOM_MB}mb")


def memory_again(server: Redis) -> None:
    server.config_set("maxmemory", 0)


def no_disk(server: Redis, folder: Path) -> None:
    """Where its snapshot belongs lies something else: it can no more write one than on a disk that is full."""
    (folder / "dump.rdb" / "in the way").mkdir(parents=True)
    save(server, "err")


def disk_again(server: Redis, folder: Path) -> None:
    (folder / "dump.rdb" / "in the way").rmdir()
    (folder / "dump.rdb").rmdir()
    save(server, "ok")


def save(server: Redis, how: str) -> None:
    server.bgsave()
    until(lambda: server.info("persistence")["rdb_last_bgsave_status"] == how)


def answers(server: Redis) -> bool:
    try:
        return bool(server.ping())
    except NotThere:
        return False


def until(done: Callable[[], bool]) -> None:
    while not done():
        pass


async def test_a_change_that_has_no_room_is_refused_as_such_and_made_once_there_is_room(server, store):
    no_memory(server)
    with pytest.raises(StoreFull, match=r"used all memory it may .* refuses writes"):
        await store.write({"a": b"1"})
    full = await store.full()
    memory_again(server)
    await store.write({"a": b"2"})

    assert "used all memory" in full
    assert await store.full() == ""
    assert await store.get("a") == b"2"
    assert issubclass(StoreFull, StoreUnavailable), "whoever rides out an outage rides this out"


async def test_actors_stay_seen_and_may_come_back_while_the_memory_is_full(server, store):
    await store.lease("actor/a-1", 1, b"before", 5.0)
    no_memory(server)

    assert await store.lease("actor/a-1", 1, b"renewed", 5.0)
    assert await store.lease("actor/a-2", 2, b"new", 5.0)
    assert await store.increment("incarnation") == 1
    assert await store.append("events", b"ready") == 1
    assert await store.release("actor/a-2", 2)
    assert list(await store.leases("actor/")) == ["actor/a-1"]
    assert not await store.release("actor/a-3", 1)


async def test_a_disk_that_takes_nothing_is_told_from_a_full_memory(server, store, tmp_path):
    await asyncio.to_thread(no_disk, server, tmp_path / "server")
    with pytest.raises(StoreFull, match="could not write to its disk"):
        await store.write({"a": b"1"})
    full = await store.full()
    await asyncio.to_thread(disk_again, server, tmp_path / "server")

    await store.write({"a": b"2"})
    assert "could not write to its disk" in full
    assert await store.full() == ""


async def test_a_server_that_may_forget_or_evict_is_named(server, store):
    server.config_set("maxmemory-policy", "allkeys-lru")
    worried = concerns(await store.figures(), StateSection())
    server.config_set("maxmemory-policy", "noeviction")
    server.config_set("appendonly", "yes")

    assert ["appendonly yes" in worried[0], "maxmemory-policy noeviction" in worried[1]] == [True, True]
    assert concerns(await store.figures(), StateSection()) == []


@pytest.mark.slow
def test_the_launch_says_that_the_server_may_lose_samples_and_goes_on(server, url, tmp_path):
    server.config_set("maxmemory-policy", "volatile-ttl")
    (tmp_path / "idle.yaml").write_text(IDLE)
    launch = subprocess.Popen(
        [sys.executable, "-m", "rubato.runtime.cli", "launch", "idle.yaml", f"state.url={url}", "--run-dir", "run"],
        cwd=tmp_path, env=clean_environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    assert launch.stdout is not None
    told = ""
    while "actors" not in told:
        told += launch.stdout.readline()
    launch.send_signal(signal.SIGINT)
    launch.communicate()

    assert told.count("Set there: appendonly yes") == 1
    assert told.count("Set there: maxmemory-policy noeviction") == 1
    assert "volatile-ttl" in told
    assert launch.returncode == 130


@pytest.mark.slow
async def test_a_job_waits_for_room_says_so_and_goes_on(server, url, tmp_path):
    write_model(tmp_path / "model")
    (tmp_path / "small.yaml").write_text(SMALL)
    overrides = [f"model.path={tmp_path / 'model'}", "run.steps=100000", f"state.url={url}"]
    run, output = tmp_path / "run", tmp_path / "output"
    launch = started(output, "launch", "small.yaml", *overrides, "--run-dir", "run", cwd=tmp_path)
    try:
        await eventually(lambda: ended(run) > 8)
        no_memory(server)
        await eventually(lambda: "refuses writes" in why(run))
        await asyncio.sleep(1.5 * LEASE_TTL_S)  # whoever could not renew its lease would be gone by then
        paused = await asyncio.to_thread(why, run)
        memory_again(server)
        before = ended(run)
        await eventually(lambda: ended(run) > before + 8)
        await eventually(lambda: "the Store takes writes again" in output.read_text())
        said = output.read_text()
        stopped = await asyncio.to_thread(rubato, "stop", "--run", "run", cwd=tmp_path)
    finally:
        launch.send_signal(signal.SIGINT)
        await asyncio.to_thread(launch.wait)

    assert "The run pauses" in paused
    assert "trainer-1" in paused
    assert "dead" not in paused
    assert said.count("refuses writes. The run pauses.") == 1
    assert " died " not in said
    assert stopped.code == 0


IDLE = """
run: {name: idle}
actors:
  sample_buffer: {class: "rubato.actors.samples.buffer:SampleBuffer"}
report: {finish: ""}
"""


def why(run: Path) -> str:
    return " ".join(rubato("monitor", run, "--why", cwd=run).out.split())


def ended(run: Path) -> int:
    """Samples so far that found their end."""
    ledger = run / "samples.jsonl"
    return ledger.read_bytes().count(b"\n") if ledger.exists() else 0


async def eventually(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not await asyncio.to_thread(holds):  # noqa: ASYNC110 - what another process writes sends no event
            await asyncio.sleep(0.2)


def started(output: Path, *arguments: str, cwd: Path) -> subprocess.Popen[bytes]:
    with output.open("w") as file:
        command = [sys.executable, "-m", "rubato.runtime.cli", *arguments]
        return subprocess.Popen(command, cwd=cwd, env=clean_environment(), stdout=file, stderr=file)
