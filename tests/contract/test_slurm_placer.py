"""What Slurm's placer does beside the contract: how hosts share nodes, what is waited for, and what others do to a step."""

import asyncio
from pathlib import Path

import pytest
import pytest_asyncio

from rubato.runtime.launch.placer import HostSpec, NotPlaced
from tests.contract.placers import ANY, does
from tests.contract.slurm_bed import SlurmBed, nodes, slurm

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def cluster():
    with nodes() as cluster:
        yield cluster


@pytest_asyncio.fixture
async def bed(cluster, tmp_path) -> SlurmBed:
    async with slurm(tmp_path, cluster) as made:
        yield made


async def test_hosts_that_ask_for_cores_share_nodes_and_are_spread_first(bed, cluster):
    spec = HostSpec("near", 4, roles={"env": 1}, cpus=1)

    hosts = [await bed.placer.place(spec, does("stay")) for _ in range(4)]

    assert [cluster.steps()[host.id] for host in hosts] == ["n1", "n2", "n3", "n1"]


async def test_a_host_waits_for_a_node_that_is_taken_and_cancelled_it_is_asked_for_no_more(bed):
    hosts = [await bed.placer.place(ANY, does("stay")) for _ in range(3)]

    with pytest.raises(TimeoutError):
        async with asyncio.timeout(2.0):
            await bed.placer.place(ANY, does("stay"))
    async with asyncio.TaskGroup() as tasks:
        waits = tasks.create_task(bed.placer.place(ANY, does("stay")))
        await hosts[1].release()

    assert waits.result().id not in {host.id for host in hosts}
    assert bed.left() == 3


async def test_a_step_that_others_cancel_is_lost_and_why_is_known(bed, cluster):
    host = await bed.placer.place(ANY, does("stay"))

    cluster.run("scancel", host.id)
    ending = await host.ended()

    assert ending.lost
    assert ending.sentence.startswith("srun: ")


async def test_what_no_node_can_hold_is_named_with_what_the_nodes_have(bed):
    with pytest.raises(NotPlaced) as refused:
        await bed.placer.place(HostSpec("far", 1, gpus=8, cpus=64, labels=("h20",)), does("stay"))

    said = str(refused.value)
    assert "can hold a host of far, which needs 8 GPUs, 64 cores, h20: it has n1 (2 cores), n2 (2 cores), n3 (2 cores)." in said


async def test_the_token_is_on_no_command_line_and_in_no_environment(bed):
    host = await bed.placer.place(ANY, does("stay", token="a-very-own-secret"))
    await bed.up(host)

    seen = [path for name in ("cmdline", "environ") for path in Path("/proc").glob(f"[0-9]*/{name}") if b"very-own-secret" in read(path)]

    assert seen == []


def read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


async def test_an_allocation_that_is_over_places_nothing(bed, cluster):
    cluster.run("scancel", bed.job)
    cluster.until_idle()

    with pytest.raises(NotPlaced, match="allocation"):
        await bed.placer.place(ANY, does("stay"))
