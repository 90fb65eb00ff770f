"""A Redis that fails over: what was acknowledged is there, nothing is given twice, and who was fenced stays so while the old master takes writes."""

import asyncio
import json
import secrets
import signal
import subprocess
import sys
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from rubato.runtime.registry import LEASE_TTL_S
from rubato.runtime.store import fitness, sentinel
from rubato.runtime.store.embedded import find_server
from rubato.runtime.store.redis import ROOM_S, RedisStore
from rubato.runtime.store.store import Fence, Fenced, StoreError, StoreFull, StoreUnavailable, WriteNumber
from rubato.sim.audit import AuditLimits, audit
from tests.jobs import SMALL, clean_environment, rubato, write_model
from tools.failover_bed import SERVICE, FailoverBed, Node, eventually, failover_bed, free_ports

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
async def bed(tmp_path: Path) -> AsyncGenerator[FailoverBed]:
    """Servers that take writes without a replica too."""
    async with failover_bed(tmp_path / "bed", find_server(), needed=0) as bed:
        yield bed


def store_of(bed: FailoverBed, **options: object) -> RedisStore:
    return RedisStore(bed.url, "test", **options)


def straight_to(node: Node, *, replicated: bool) -> RedisStore:
    return RedisStore(f"redis://127.0.0.1:{node.port}", "test", patience_s=0.0, replicated=replicated)


def test_no_acknowledged_write_is_lost_over_failovers_nor_one_of_a_fenced_writer_acknowledged(tmp_path):
    command = [sys.executable, ROOT / "tools/bench/failovers.py", "--failovers", "3", "--json", tmp_path / "found.json"]

    subprocess.run(command, check=True, cwd=ROOT, env=clean_environment())

    found = json.loads((tmp_path / "found.json").read_text())
    assert (found["failovers"], found["without_loss"], found["lost"], found["numbers_twice"]) == (3, 3, 0, 0)
    assert found["acknowledged"] > 600
    assert found["fenced"]["tried"] >= 3
    assert (found["fenced"]["acknowledged"], found["fenced"]["kept"]) == (0, 0)


async def test_a_fenced_writer_at_the_old_master_is_not_acknowledged_and_what_it_wrote_is_gone(bed):
    store = store_of(bed, replicated=True)
    await store.write({"k": b"1"}, fence=Fence("buffer", 1), turn=WriteNumber(1, after=(0, 0)))
    before = await bed.master()
    before.send(signal.SIGSTOP)
    await bed.switched(before)
    await store.close()
    store = store_of(bed, replicated=True)  # sends nothing to the one that is stopped, which would have it on its return
    await store.write({"k": b"2"}, fence=Fence("buffer", 2), turn=WriteNumber(1, after=(1, 1)))
    before.send(signal.SIGCONT)

    old = straight_to(before, replicated=True)
    refused = list[str]()
    while (await before.info()).get("role") != "slave":
        with pytest.raises(StoreError) as told:  # the last one may be Fenced: by then it follows
            await old.write({"k": b"zombie"}, fence=Fence("buffer", 1), turn=WriteNumber(2))
        refused.append(str(told.value))
    await bed.settled()

    assert any("has no replica that takes its writes" in each for each in refused), refused
    assert await store.get("k") == b"2"
    with pytest.raises(Fenced, match="token 1, but 2 was seen"):
        await store.write({"k": b"zombie"}, fence=Fence("buffer", 1), turn=WriteNumber(2))
    await old.close()
    await store.close()


async def test_a_number_that_a_failover_forgot_is_not_given_again_when_the_old_master_is_back_in_office(bed):
    first, second = bed.servers[:2]
    for each in (*bed.sentinels, bed.servers[2]):
        await each.kill()
    at_first, at_second = straight_to(first, replicated=False), straight_to(second, replicated=False)
    numbers = [await at_first.increment("term") for _ in range(5)]
    await first.admin.wait(1, 5000)
    await second.admin.replicaof("NO", "ONE")
    numbers += [await at_first.increment("term") for _ in range(5)]  # which the new master never has
    await first.admin.replicaof("127.0.0.1", second.port)
    await eventually(lambda: follows(first))
    await first.admin.replicaof("NO", "ONE")
    numbers += [await at_first.increment("term") for _ in range(5)]

    assert len(set(numbers)) == len(numbers), numbers
    await at_first.close()
    await at_second.close()


async def follows(node: Node) -> bool:
    return (await node.info()).get("master_link_status") == "up"


async def test_a_write_that_no_replica_acknowledges_is_refused_for_now_and_made_once(bed):
    store = store_of(bed, replicated=True, patience_s=3.0)
    await store.write({}, fence=Fence("buffer", 1), turn=WriteNumber(1, after=(0, 0)))
    master = await bed.master()
    for each in bed.servers:
        if each is not master:
            await each.kill()

    with pytest.raises(
        StoreFull, match=r"has no replica that takes its writes and refuses writes\. The run pauses\. Start one: the run goes on"
    ):
        await store.write({"k": b"1"}, fence=Fence("buffer", 1), turn=WriteNumber(2))
    paused = await store.full()
    for each in bed.servers:
        if each is not master:
            await each.start("--replicaof", "127.0.0.1", str(master.port))
    await bed.settled()
    await store.write({"k": b"1"}, fence=Fence("buffer", 1), turn=WriteNumber(2))

    assert "has no replica" in paused
    assert await store.full() == ""
    assert (await store.get("k"), await store.fenced("buffer")) == (b"1", (1, 2))
    await store.close()


async def test_a_write_waits_for_a_replica_that_is_on_its_way(bed):
    """As after each failover: the next master has none until one has read all that it holds."""
    store = store_of(bed, replicated=True, patience_s=60.0)
    master = await bed.master()
    others = [each for each in bed.servers if each is not master]
    for each in others:
        await each.kill()

    async def follow() -> None:
        await eventually(lambda: refuses(bed))
        await asyncio.sleep(1.5 * ROOM_S)  # what a server without memory is given
        for each in others:
            await each.start("--replicaof", "127.0.0.1", str(master.port))

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(follow())
        assert await store.append("log", b"1") == 1
    await store.close()


async def refuses(bed: FailoverBed) -> bool:
    store = store_of(bed, replicated=True, patience_s=0.0)
    try:
        return bool(await store.full())
    finally:
        await store.close()


async def test_a_change_that_is_sent_again_waits_for_a_replica_as_the_first_did(bed):
    """A connection that wrote nothing has nothing that WAIT waits for."""
    store = store_of(bed, replicated=True, patience_s=3.0)
    master = await bed.master()
    for each in bed.servers:
        if each is not master:
            each.send(signal.SIGSTOP)  # they are connected, and acknowledge nothing
    with pytest.raises(StoreFull):
        await store.append("log", b"1")
    for each in bed.servers:
        each.send(signal.SIGCONT)

    assert await store.append("log", b"2") == 2
    await store.close()


async def test_a_reader_that_waits_goes_on_at_the_next_master(bed):
    store = store_of(bed)
    before = await bed.master()
    async with asyncio.TaskGroup() as tasks:
        reading = tasks.create_task(store.read("log", 0, wait_s=60.0))
        await asyncio.sleep(0)
        await before.kill()
        await store.append("log", b"after")

    assert reading.result() == [(1, b"after")]
    await store.close()


async def test_whoever_watches_is_told_of_each_change_of_the_master(bed):
    told = asyncio.Queue[tuple[str, str]]()
    async with asyncio.TaskGroup() as tasks:
        watching = tasks.create_task(sentinel.watch(bed.url, lambda before, now: told.put_nowait((before, now))))
        before = await bed.master()
        await eventually(lambda: listens(bed))
        await before.kill()
        now = await bed.switched(before)
        said = await told.get()
        watching.cancel()

    assert said == (f"127.0.0.1:{before.port}", f"127.0.0.1:{now.port}")


async def test_a_launch_as_sentinels_fall_silent_is_not_ended_by_asking_how_they_are_set(bed):
    for each in bed.sentinels:
        await each.kill()

    assert await fitness.late(bed.url) == []


async def listens(bed: FailoverBed) -> bool:
    return any([await each.admin.client_list(_type="pubsub") for each in bed.sentinels])


class Said(asyncio.StreamReaderProtocol):
    def __init__(self) -> None:
        self.reader = asyncio.StreamReader()
        super().__init__(self.reader)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.socket = transport


async def test_the_gate_leads_to_the_master_and_drops_its_ways_to_the_one_before(bed):
    connect = sentinel.way_to_master(bed.url)
    assert connect is not None
    before = await bed.master()
    protocol, later = Said(), Said()
    await connect(lambda: protocol)
    protocol.socket.write(b"PING\r\n")
    first = await protocol.reader.readline()
    before.send(signal.SIGSTOP)
    now = await bed.switched(before)
    await connect(lambda: later)
    before.send(signal.SIGCONT)

    assert first == b"+PONG\r\n"
    assert await protocol.reader.read() == b""
    assert later.socket.get_extra_info("peername")[1] == now.port
    later.socket.close()


# -- what is wrong is told in a sentence ---------------------------------------------------------------------------


@pytest.fixture
async def locked(tmp_path: Path) -> AsyncGenerator[FailoverBed]:
    """Master and sentinels want a password each."""
    keys = {"password": secrets.token_hex(8), "sentinel_password": secrets.token_hex(8)}
    async with failover_bed(tmp_path / "bed", find_server(), replicas=1, **keys) as bed:
        yield bed


async def test_what_a_url_of_sentinels_has_wrong_is_said_without_its_passwords(locked):
    key, sentinel_key = locked._password, locked._sentinel_password
    hosts = locked.url.partition("@")[2].partition("/")[0]
    wrong = {
        locked.url.replace(sentinel_key, "guessed"): "the sentinel at 127.0.0.1:.* refused the password. Set one in state.url: .sentinel_password=",
        locked.url.partition("?")[0]: "the sentinel at 127.0.0.1:.* refused the password",
        locked.url.replace(f":{key}@", ":guessed@"): f"redis.sentinel://{hosts}/{SERVICE} refused the password",
        locked.url.replace(f"/{SERVICE}", "/other"): f"the sentinels of .*{hosts}/other know no service 'other' .they know: {SERVICE}.. Correct state.url",
        "redis+sentinel://:secret@127.0.0.1:1/other": "redis.sentinel://127.0.0.1:1/other could not be reached .* no sentinel answers: 127.0.0.1:1: ",
    }  # fmt: skip

    for url, sentence in wrong.items():
        store = RedisStore(url, "test", patience_s=0.0)
        with pytest.raises(
            StoreUnavailable, match=sentence.replace("could not be reached .* no", "could not be reached for 0 s .no")
        ) as told:
            await store.get("k")
        await store.close()
        assert not any(word in str(told.value) for word in (key, sentinel_key, "guessed", "secret"))

    store = RedisStore(locked.url, "test", replicated=True)
    await store.write({"k": b"1"})
    assert await store.get("k") == b"1"
    await store.close()


# -- whole runs ------------------------------------------------------------------------------------------------------

STEPS = 80


def launched(place: Path, url: str, *overrides: str) -> subprocess.Popen[bytes]:
    """A run of scripted parts in `place`/run; what it says is in `place`/output."""
    (place / "small.yaml").write_text(SMALL)
    write_model(place / "model")
    command = [sys.executable, "-m", "rubato.runtime.cli", "launch", "small.yaml", "--run-dir", "run", f"model.path={place / 'model'}"]
    with (place / "output").open("w") as output:
        return subprocess.Popen(
            [*command, f"state.url={url}", *overrides], cwd=place, env=clean_environment(), stdout=output, stderr=output
        )


def rows(place: Path) -> int:
    metrics = place / "run" / "metrics.jsonl"
    return metrics.read_bytes().count(b"\n") if metrics.exists() else 0


async def grown(place: Path, launch: subprocess.Popen[bytes], least: int) -> None:
    async def has() -> bool:
        assert launch.poll() is None, (place / "output").read_text()
        return rows(place) >= least

    await eventually(has, 90.0)


async def test_a_run_whose_master_is_killed_twice_goes_on_without_a_gap(tmp_path):
    async with failover_bed(tmp_path / "bed", find_server()) as bed:
        overrides = (f"run.steps={STEPS}", "train.scripted.step_s=0.25", "checkpoint.every=20")
        launch = launched(tmp_path, bed.url, "state.durability=replicated", *overrides)
        try:
            for least in (10, 30):
                await grown(tmp_path, launch, least)
                before = await bed.settled()
                await before.kill()
                now = await bed.switched(before)
                await before.start("--replicaof", "127.0.0.1", str(now.port))
            await asyncio.to_thread(launch.wait, 150)
        finally:
            launch.send_signal(signal.SIGINT)
            await asyncio.to_thread(launch.wait)

    said = (tmp_path / "output").read_text()
    found = audit(tmp_path / "run", AuditLimits(STEPS, 2, 2, alpha=1, durable=True))
    assert launch.returncode == 0, said
    assert (found.problems, found.steps) == ([], STEPS), said
    assert " died " not in said
    assert said.count("the Store failed over from 127.0.0.1:") >= 2  # a busy host may see one more


@pytest.mark.nightly
async def test_a_run_pauses_while_no_replica_is_there_says_so_and_goes_on(tmp_path):
    async with failover_bed(tmp_path / "bed", find_server(), replicas=1) as bed:
        launch = launched(tmp_path, bed.url, "state.durability=replicated", "run.steps=100000")
        try:
            await grown(tmp_path, launch, 5)
            replica = bed.servers[1]
            await replica.kill()
            await eventually(lambda: said(tmp_path, "has no replica that takes its writes and refuses writes. The run pauses."))
            await asyncio.sleep(1.5 * LEASE_TTL_S)  # whoever could not renew its lease would be gone by then
            paused = rows(tmp_path)
            await asyncio.sleep(1.0)
            assert rows(tmp_path) == paused
            await replica.start("--replicaof", "127.0.0.1", str(bed.servers[0].port))
            await eventually(lambda: said(tmp_path, "the Store takes writes again: the run goes on"))
            await grown(tmp_path, launch, paused + 5)
            stopped = await asyncio.to_thread(rubato, "stop", "--run", "run", cwd=tmp_path)
        finally:
            launch.send_signal(signal.SIGINT)
            await asyncio.to_thread(launch.wait)

    assert stopped.code == 0
    assert " died " not in (tmp_path / "output").read_text()


async def said(place: Path, sentence: str) -> bool:
    return sentence in (place / "output").read_text()


async def test_a_launch_refuses_what_would_not_hold_in_a_sentence(tmp_path):
    program = find_server()
    (port,) = free_ports(1)
    folder = tmp_path / "cluster"
    cluster = Node(program, folder, port, f'port {port}\nbind 127.0.0.1\nlogfile "{folder}/log"\ncluster-enabled yes\n')
    (tmp_path / "small.yaml").write_text(SMALL)
    write_model(tmp_path / "model")
    try:
        await cluster.start()
        async with failover_bed(tmp_path / "bed", program, replicas=1, needed=0) as bed:
            for url, durability, sentence in (
                (
                    bed.url, "replicated", "takes no writes once it is cut off from its replicas, and state.url names one that does. "
                    "Set there: min-replicas-to-write 1, and on its replicas too.",
                ),
                (f"redis://127.0.0.1:{port}", "everysec", "state.url names a Redis Cluster, which a run does not use: "),
            ):  # fmt: skip
                overrides = (f"model.path={tmp_path / 'model'}", f"state.url={url}", f"state.durability={durability}")
                ended = await asyncio.to_thread(rubato, "launch", "small.yaml", "--run-dir", "run", *overrides, cwd=tmp_path)

                assert ended.code not in (0, 1), ended
                assert sentence in ended.err, ended
                assert ended.err.count("\n") == 1, ended.err
    finally:
        await cluster.end()
