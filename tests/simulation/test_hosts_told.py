"""What the first host's user is told of the other hosts: which is out of reach, back, gone for good, or left by itself."""

import asyncio
from contextlib import asynccontextmanager

from rubato.bus.link import Identity
from rubato.bus.memory import MemoryNetwork, MemoryTransport
from rubato.runtime.actor import Actor, RunInfo
from rubato.runtime.config.compose import from_mapping
from rubato.runtime.kernel import Kernel
from rubato.runtime.launch.agent import Hosting, JobOutcome, NodeAgent
from rubato.runtime.memory import MemoryBlobStore, MemoryStore
from rubato.runtime.messages import AddActors
from rubato.runtime.observe.log import logger
from rubato.runtime.places import HostPlaces
from rubato.runtime.registry import LEASE_TTL_S
from rubato.runtime.store.store import StoreUnavailable
from tests.virtual import virtual

WITH = "and with it worker-1"


class Worker(Actor):
    role = "worker"


JOB = from_mapping({"run": {"lease_s": 60.0}, "actors": {"worker": {"class": f"{__name__}:Worker"}}})


class Screen:
    def __init__(self):
        self.told = []

    def progress(self, message): ...
    def actors(self, ready, wanted): ...

    def notice(self, text, *, good=False):
        self.told.append((good, text))


class NoBackend:
    """None of these hosts starts anything."""


class CutStore(MemoryStore):
    """What a host behind a cut has of the Store: nothing, while `cut`."""

    cut = False

    async def lease(self, name, token, value, ttl_s):
        if self.cut and name == "actor/node-2":
            raise StoreUnavailable("cut off")
        return await super().lease(name, token, value, ttl_s)


@asynccontextmanager
async def two_hosts(tmp_path):
    """The first host's agent and what it said, the second's, and the Store. worker-1 was given to the second."""
    store, network, screen = CutStore(), MemoryNetwork(), Screen()
    agents = []
    async with asyncio.TaskGroup() as tasks:
        for name, shown in (("node-1", screen), ("node-2", Screen())):
            incarnation = await store.increment("incarnation")
            kernel = Kernel(
                NodeAgent, Hosting(JOB, shown, NoBackend(), places=HostPlaces.here(JOB)), name=name, incarnation=incarnation,
                run=RunInfo("r", tmp_path, 1, 1), store=store, blobs=MemoryBlobStore(), log=logger("test"), node=name,
                transport=MemoryTransport(Identity("r", name, incarnation), network),
            )  # fmt: skip
            agents.append((kernel.build(), kernel))
            tasks.create_task(kernel.serve())
            await kernel.ready.wait()
        (first, _), (second, _) = agents
        await second.ref("node-1").ask(AddActors("worker", 1, "node-2"), timeout=5)
        screen.told.clear()
        yield first, agents[1], screen.told, store
        for _, kernel in agents:
            kernel.stop()


@virtual
async def test_a_host_that_is_cut_off_is_told_as_out_of_reach_and_then_as_back(tmp_path):
    async with two_hosts(tmp_path) as (_, _, told, store):
        store.cut = True
        await asyncio.sleep(LEASE_TTL_S + 20.0)
        away = list(told)

        store.cut = False
        await asyncio.sleep(5.0)
        back = told[len(away) :]

    assert away == [
        (
            False,
            f"node-2 is out of reach, {WITH}. It goes on where it can, and comes back by itself when the way to it is open; after 60 s "
            "(run.lease_s) it leaves the run",
        )
    ]
    assert [(good, text.partition(" after ")[0]) for good, text in back] == [(True, "node-2 is back")]
    assert back[0][1].endswith(WITH)


@virtual
async def test_a_host_that_does_not_come_back_is_told_as_gone_once_it_has_left(tmp_path):
    async with two_hosts(tmp_path) as (_, _, told, store):
        store.cut = True
        await asyncio.sleep(LEASE_TTL_S + 20.0 + 60.0)

    assert [text for _, text in told[1:]] == [f"node-2 is gone: it was out of reach for 60 s, {WITH}"]


@virtual
async def test_a_host_that_was_told_as_gone_and_is_there_again_is_told_so(tmp_path):
    async with two_hosts(tmp_path) as (_, _, told, store):
        store.cut = True
        await asyncio.sleep(LEASE_TTL_S + 20.0 + 60.0)
        before = len(told)
        store.cut = False
        await asyncio.sleep(5.0)

    assert [(good, text.partition(", after ")[0]) for good, text in told[before:]] == [(True, "node-2 is back after all")]


@virtual
async def test_a_host_whose_process_has_ended_is_its_placers_to_tell(tmp_path):
    async with two_hosts(tmp_path) as (first, _, told, store):
        store.cut = True
        first.hosts.ended("node-2")
        await asyncio.sleep(LEASE_TTL_S + 20.0 + 60.0)

    assert told == []


@virtual
async def test_a_host_that_leaves_is_told_as_that(tmp_path):
    async with two_hosts(tmp_path) as (_, (second, kernel), told, _):
        await second.stop("interrupted")
        kernel.stop()
        await asyncio.sleep(2.0)

    assert told == [(True, "node-2 left the run")]


@virtual
async def test_hosts_that_end_with_the_job_are_no_news(tmp_path):
    async with two_hosts(tmp_path) as (first, (second, kernel), told, _):
        first.end(JobOutcome("done", "done"))
        await second.stop("done")
        kernel.stop()
        await asyncio.sleep(80.0)

    assert told == []
