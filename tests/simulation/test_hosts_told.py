"""What the first host's user is told of the other hosts: which is out of reach, back, gone for good, or left by itself; and how these are
told to go.
"""

import asyncio
from contextlib import asynccontextmanager

import pytest

from rubato.bus.link import Identity
from rubato.bus.memory import MemoryNetwork, MemoryTransport
from rubato.bus.message import Ack
from rubato.runtime.actor import Actor, RunInfo, handler
from rubato.runtime.config.compose import from_mapping
from rubato.runtime.kernel import Kernel
from rubato.runtime.launch.agent import STOP_LIMITS_S, Hosting, JobOutcome, NodeAgent
from rubato.runtime.launch.agent_messages import AddActors, Added, StopJob
from rubato.runtime.launch.host_list import name_key
from rubato.runtime.launch.hosts import TELL_S
from rubato.runtime.memory import MemoryBlobStore, MemoryStore
from rubato.runtime.observe.log import logger
from rubato.runtime.places import HostPlaces
from rubato.runtime.registry import LEASE_TTL_S
from rubato.runtime.store.store import StoreUnavailable
from tests.virtual import virtual

WITH = "and with it worker-1"


class Worker(Actor):
    role = "worker"


JOB = from_mapping({
    "run": {"lease_s": 60.0}, "actors": {"worker": {"class": f"{__name__}:Worker"}}, "bus": {"host": "127.0.0.1"},
    "launch": {"hosts": {"far": {"pools": {"worker": 1}}}},
})  # fmt: skip


class Screen:
    def __init__(self):
        self.told = []

    def progress(self, message): ...
    def actors(self, ready, wanted): ...

    def notice(self, text, *, good=False):
        self.told.append((good, text))


class Silent(NodeAgent):
    """Answers nothing that it is asked, as a host does whose process is stopped."""

    @handler
    async def stop_job(self, request: StopJob) -> Ack:
        await asyncio.Event().wait()
        return Ack()


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
async def hosts(tmp_path, *others, agent=NodeAgent):
    """The agents and kernels of the first host and of `others`, each an `agent`, what the first one said, and the Store."""
    store, network, screen = CutStore(), MemoryNetwork(), Screen()
    agents = []
    async with asyncio.TaskGroup() as tasks:
        for name, kind, shown in (("node-1", NodeAgent, screen), *((name, agent, Screen()) for name in others)):
            incarnation = await store.increment("incarnation")
            kernel = Kernel(
                kind, Hosting(JOB, shown, NoBackend(), places=HostPlaces.here(JOB)), name=name, incarnation=incarnation,
                run=RunInfo("r", tmp_path, 1, 1), store=store, blobs=MemoryBlobStore(), log=logger("test"), node=name,
                transport=MemoryTransport(Identity("r", name, incarnation), network),
            )  # fmt: skip
            agents.append((kernel.build(), kernel))
            tasks.create_task(kernel.serve())
            await kernel.ready.wait()
        yield agents, screen.told, store
        for _, kernel in agents:
            kernel.stop()


@asynccontextmanager
async def two_hosts(tmp_path):
    """The first host's agent and what it said, the second's, and the Store. worker-1 was given to the second."""
    async with hosts(tmp_path, "node-2") as (((first, _), (second, kernel)), told, store):
        await second.ref("node-1").ask(AddActors("worker", 1, "node-2"), timeout=5)
        told.clear()
        yield first, (second, kernel), told, store


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


# -- how they are told to go ----------------------------------------------------------------------------------------


@virtual
async def test_of_nodes_of_one_name_the_newest_in_reach_is_drained(tmp_path):
    """The Store keeps the names of nodes that are gone, and node-9 is the last of these in the order of bytes."""
    async with hosts(tmp_path, "node-8", "node-9", "node-10") as (((first, _), *others), _, store):
        (_, gone), (older, _), (newest, kernel) = others
        await store.write({name_key(name): b"far-1" for name in ("node-8", "node-9", "node-10", "node-99")})
        gone.stop()
        await asyncio.sleep(1.0)

        drained = first.spawn(first.hosts.drain(["far-1"]), name="drain")
        await asyncio.sleep(1.0)
        told = (older.over.done(), newest.over.done())
        kernel.stop()
        once, again = await drained, await first.hosts.drain(["node-10"])

    assert told == (False, True)
    assert once == again == Added(("node-10",))


@virtual
async def test_a_drain_by_a_hosts_own_name_that_is_repeated_gets_its_answer_again(tmp_path):
    async with hosts(tmp_path, "node-2") as (((first, _), (second, kernel)), _, store):
        await store.write({name_key("node-2"): b"far-1"})

        drained = first.spawn(first.hosts.drain(["far-1"]), name="drain")
        await second.over
        kernel.stop()
        once, again = await drained, await first.hosts.drain(["far-1"])

    assert once == again == Added(("node-2",))


@pytest.mark.parametrize("kind", ["interrupted", "done", "failed"])
def test_a_host_that_does_not_answer_keeps_no_job_from_ending_for_longer_than_an_end_of_its_kind_takes(tmp_path, kind):
    @virtual
    async def main():
        clock = asyncio.get_running_loop().time
        async with hosts(tmp_path, "node-2", agent=Silent) as (((first, _), _), _, _):
            began = clock()
            await first.stop(kind)
            return clock() - began

    assert main() <= STOP_LIMITS_S[kind] + TELL_S + 1.0  # of virtual seconds


@virtual
async def test_a_host_that_is_stopped_is_not_waited_for_past_its_lease(tmp_path):
    async with hosts(tmp_path, "node-2", agent=Silent) as (((first, _), _), _, store):
        store.cut = True
        clock = asyncio.get_running_loop().time
        began = clock()
        await first.stop("interrupted")
        took_s = clock() - began

    assert took_s < LEASE_TTL_S + 2 * TELL_S  # of virtual seconds
