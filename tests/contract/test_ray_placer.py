"""RayPlacer under the contract of placers, and what is Ray's alone, on three nodes of this host."""

import asyncio
from contextlib import suppress
from pathlib import Path

import pytest
import pytest_asyncio

from rubato.runtime.launch.placer import HostSpec, NotPlaced
from tests.contract.placers import ANY, does
from tests.contract.test_placer import *  # noqa: F403 - the contract
from tests.contract.test_placer import end_of
from tests.ray_cluster import RayBed, commands_running, placer_for, ray_bed

pytestmark = pytest.mark.slow

TOKEN = "a-token-that-is-nowhere-else"


@pytest_asyncio.fixture
async def bed(ray_cluster, tmp_path) -> RayBed:
    async with ray_bed(ray_cluster, tmp_path) as made:
        yield made


async def test_a_host_has_the_gpus_that_ray_gave_it_and_else_none(bed):
    with_one = await bed.placer.place(HostSpec("far", 1, gpus=1, labels=("h20",)), does("tell", "CUDA_VISIBLE_DEVICES"))
    first = await end_of(with_one)
    await with_one.release()
    without = await end_of(await bed.placer.place(HostSpec("far", 1), does("tell", "CUDA_VISIBLE_DEVICES")))

    assert (first.sentence, without.sentence) == ("0", "")


async def test_a_host_that_has_no_room_now_comes_once_there_is_some(bed):
    first = await bed.placer.place(bed.later, does("stay"))
    async with asyncio.TaskGroup() as tasks:
        second = tasks.create_task(bed.placer.place(bed.later, does("exit", "0", "it came")))
        while bed.left() < 2:  # noqa: ASYNC110 - Ray tells it by no event
            await asyncio.sleep(0.05)
        waits = not second.done()
        await first.release()

    assert waits
    assert (await end_of(second.result())).sentence == "it came"


async def test_a_launcher_that_is_frozen_and_unseen_by_ray_is_outlived_for_a_lease_at_most(bed):
    left = await bed.freeze_launcher()

    assert left == 0
    assert commands_running() == []


async def test_the_log_of_a_host_is_kept_where_the_launcher_is(bed):
    host = await bed.placer.place(ANY, does("exit", "1", "there is no engine here"))
    ending = await end_of(host)

    assert (ending.code, ending.sentence) == (1, "there is no engine here")
    assert Path(ending.log).read_text() == "there is no engine here\n"


async def test_the_folder_of_a_host_goes_with_it_or_with_the_next_one_where_it_was_killed(bed, ray_cluster):
    def folders():
        return sorted(ray_cluster.folder.glob("rubato-host-*"))

    killed = await bed.placer.place(ANY, does("stay"))
    bed.placer._helper.kill()
    await end_of(killed)
    left = folders()
    host = await bed.placer.place(ANY, does("stay"))
    (own,) = folders()
    await host.release()

    assert own not in left
    assert folders() == []


async def test_the_token_is_in_no_file_of_ray_on_no_command_line_and_not_in_its_store(bed, ray_cluster, tmp_path):
    host = await bed.placer.place(ANY, does("stay", token=TOKEN))
    await bed.up(host)
    lines = [line for _, line in processes()]
    session = [path for path in ray_cluster.session.rglob("*") if path.is_file()]
    store = [pid for pid, line in processes() if b"gcs_server" in line and str(ray_cluster.session).encode() in line]
    helpers = [pid for pid, line in processes() if b"rubato.runtime.launch.ray.helper" in line]

    assert [line for line in lines if TOKEN.encode() in line] == []
    assert [path for path in [*session, *tmp_path.rglob("*.log")] if TOKEN.encode() in path.read_bytes()] == []
    assert any(path.name.startswith("gcs_server") for path in session)
    assert [holds(pid, TOKEN.encode()) for pid in store] == [False]
    assert any(holds(pid, TOKEN.encode()) for pid in helpers)


def processes() -> list[tuple[str, bytes]]:
    """Ids and command lines."""
    found: list[tuple[str, bytes]] = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            found.append((process.name, (process / "cmdline").read_bytes()))
    return found


def holds(pid: str, text: bytes) -> bool:
    """Whether what a process has written to its memory has `text` in it."""
    process = Path("/proc") / pid
    with (process / "mem").open("rb", 0) as memory:
        for line in (process / "maps").read_text().splitlines():
            span, rights = line.split()[:2]
            first, last = (int(end, 16) for end in span.split("-"))
            if rights.startswith("rw") and "/dev/shm" not in line:
                with suppress(OSError):
                    memory.seek(first)
                    if text in memory.read(last - first):
                        return True
    return False


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("127.0.0.1:1", r"^no Ray cluster answers at launch\.address=127\.0\.0\.1:1 \(Connection refused\)\. Is it up"),
        ("ray://127.0.0.1:1", r"^no Ray cluster answers at launch\.address=ray://127\.0\.0\.1:1 \(Connection refused\)"),
        ("http://10.0.0.5:8265", r"^launch\.address=http://10\.0\.0\.5:8265 is no address of a Ray cluster\. Use HOST:PORT"),
    ],
)
async def test_a_cluster_that_does_not_answer_is_told_in_one_sentence(address, said, tmp_path):
    pytest.importorskip("ray", reason="needs ray (extra `ray`)")
    placer = placer_for(address, tmp_path)

    with pytest.raises(NotPlaced, match=said) as refused:
        await placer.place(ANY, does("stay"))
    await placer.close()

    assert "\n" not in str(refused.value)


async def test_a_variable_that_names_no_cluster_is_named(tmp_path, monkeypatch):
    pytest.importorskip("ray", reason="needs ray (extra `ray`)")
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    placer = placer_for("auto", tmp_path)

    with pytest.raises(NotPlaced, match=r"^no Ray cluster answers at RAY_ADDRESS=127\.0\.0\.1:1"):
        await placer.place(ANY, does("stay"))
    await placer.close()


async def test_where_the_helper_dies_its_hosts_are_lost_and_the_next_host_has_another(bed):
    host = await bed.placer.place(ANY, does("stay"))
    bed.placer._helper.kill()
    ending = await end_of(host)
    await host.release()

    again = await bed.placer.place(ANY, does("stay"))

    assert ending.lost
    assert ending.sentence.startswith("the process that speaks to Ray ended")
    assert again.id != host.id
    assert bed.left() == 1


async def test_without_a_cluster_one_of_this_host_is_begun_and_ends_with_the_placer(tmp_path):
    pytest.importorskip("ray", reason="needs ray (extra `ray`)")
    placer = placer_for("local", tmp_path)
    try:
        ending = await end_of(await placer.place(ANY, does("exit", "0", "it ran")))
        parent = f"\nPPid:\t{placer._helper._transport.get_pid()}\n"
        cluster = [pid for pid, _ in processes() if parent in status_of(pid)]
    finally:
        await placer.close()

    assert ending.sentence == "it ran"
    assert cluster != []
    assert [pid for pid in cluster if status_of(pid)] == []


def status_of(pid: str) -> str:
    with suppress(OSError):
        return (Path("/proc") / pid / "status").read_text()
    return ""
