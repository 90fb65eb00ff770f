"""The HostPlacer contract: what a launch may rely on, whichever engine places its hosts."""

import asyncio
import signal
from functools import partial

import pytest
import pytest_asyncio

from rubato.runtime.launch.placer import NotPlaced
from tests.contract.cluster_bed import cluster, joined_hosts
from tests.contract.placers import ANY, BEDS, PlacerBed, does
from tests.contract.slurm_bed import nodes, slurm

LIMIT_S = 30.0


@pytest.fixture(scope="module")
def slurm_nodes():
    with nodes() as cluster:
        yield cluster


@pytest.fixture(scope="module")
def cluster_hosts(tmp_path_factory):
    with joined_hosts(tmp_path_factory.mktemp("cluster")) as folder:
        yield folder


@pytest_asyncio.fixture(params=[*BEDS, *(pytest.param(name, marks=pytest.mark.slow) for name in ("slurm", "cluster"))])
async def bed(request, tmp_path) -> PlacerBed:
    if request.param in BEDS:
        make = BEDS[request.param]
    elif request.param == "slurm":
        make = partial(slurm, cluster=request.getfixturevalue("slurm_nodes"))
    else:
        make = partial(cluster, hosts=request.getfixturevalue("cluster_hosts"))
    async with make(tmp_path) as made:
        yield made


async def end_of(host):
    async with asyncio.timeout(LIMIT_S):
        return await host.ended()


async def test_the_command_runs_with_the_token_as_its_first_line(bed):
    right = await bed.placer.place(ANY, does("expect", "secret"))
    wrong = await bed.placer.place(ANY, does("expect", "another"))

    assert (await end_of(right)).code == 0
    assert (await end_of(wrong)).code == 4


async def test_its_exit_and_its_last_sentence_are_known_to_all_who_wait_before_and_after(bed):
    host = await bed.placer.place(ANY, does("exit", "2", "no such pool: far"))

    async with asyncio.TaskGroup() as tasks:
        before = [tasks.create_task(end_of(host)) for _ in range(2)]
    after = await end_of(host)

    assert (after.code, after.how, after.sentence, after.permanent) == (2, "exit 2", "no such pool: far", True)
    assert [task.result() for task in before] == [after] * 2
    assert not after.lost


async def test_hosts_of_one_spec_are_told_apart(bed):
    first, second = [await bed.placer.place(ANY, does("stay")) for _ in range(2)]

    assert first.id != second.id
    assert bed.left() == 2


async def test_one_that_is_asked_to_drain_ends_in_order(bed):
    host = await bed.placer.place(ANY, does("stay"))
    await bed.up(host)

    host.signal(signal.SIGTERM)

    assert (await end_of(host)).code == 130


async def test_one_that_is_killed_ends_so_and_another_signal_changes_nothing(bed):
    host = await bed.placer.place(ANY, does("deaf"))
    await bed.up(host)

    host.signal(signal.SIGTERM)
    host.signal(signal.SIGKILL)
    ending = await end_of(host)
    host.signal(signal.SIGTERM)

    assert (ending.code, ending.how) == (-9, "signal 9")


async def test_a_release_ends_what_no_signal_does_and_a_second_one_does_nothing(bed):
    host = await bed.placer.place(ANY, does("deaf"))
    await bed.up(host)

    await host.release()
    await host.release()

    assert (await end_of(host)).code == -9
    assert bed.left() == 0


async def test_a_host_whose_node_goes_away_is_lost_and_asked_for_anew_it_is_another(bed):
    if bed.lose is None:
        pytest.skip("its node is the launcher's")
    host = await bed.placer.place(ANY, does("stay"))

    bed.lose(host)
    ending = await end_of(host)
    await host.release()
    again = await bed.placer.place(ANY, does("stay"))

    assert ending.lost
    assert ending.code is None
    assert again.id != host.id


async def test_a_host_that_none_can_be_is_refused_with_a_sentence(bed):
    with pytest.raises(NotPlaced, match=r"\w+ .*(GPUs|h20)"):
        await bed.placer.place(bed.impossible, does("stay"))

    assert bed.left() == 0


async def test_a_host_that_did_not_come_in_time_is_no_longer_asked_for(bed):
    if bed.later is None:
        pytest.skip("a process starts at once")
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.0):
            await bed.placer.place(bed.later, does("stay"))

    assert bed.left() == 0


async def test_nothing_is_left_once_it_is_closed(bed):
    hosts = [await bed.placer.place(ANY, does(what)) for what in ("stay", "deaf")]

    await bed.placer.close()

    assert bed.left() == 0
    assert [(await end_of(host)).how for host in hosts] == ["signal 9"] * 2


async def test_nothing_is_left_of_a_launcher_that_was_lost(bed):
    assert await bed.lose_launcher() == 0


async def test_what_an_earlier_launcher_left_is_gone_once_the_next_one_has_a_host(bed):
    if bed.leave is None:
        pytest.skip("no host outlives its launcher")
    await bed.leave()
    before = bed.left()

    await bed.placer.place(ANY, does("stay"))

    assert (before, bed.left()) == (1, 1)
