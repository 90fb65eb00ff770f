"""Who is believed gone, and how soon one that comes back is seen again; and how the end of a job is told whatever is away."""

import asyncio
from contextlib import asynccontextmanager
from pathlib import Path

from rubato.bus.link import Identity
from rubato.bus.memory import MemoryNetwork, MemoryTransport
from rubato.bus.message import Ack
from rubato.runtime.actor import Actor, RunInfo, handler
from rubato.runtime.config import ActorConfig
from rubato.runtime.kernel import Kernel
from rubato.runtime.memory import MemoryBlobStore, MemoryStore
from rubato.runtime.messages import Finish
from rubato.runtime.observe.log import logger
from rubato.runtime.registry import LEASE_TTL_S, RELIST_S
from rubato.runtime.store.store import StoreUnavailable
from rubato.sim.virtual import run_virtual


class Server(Actor):
    role = "server"


class Client(Actor):
    role = "client"


class Node(Actor):
    role = "node"

    def __init__(self, config, kernel):
        super().__init__(config, kernel)
        self.heard = []
        self.told = asyncio.Event()

    @handler
    async def finished(self, message: Finish) -> Ack:
        self.heard.append(message.reason)
        self.told.set()
        return Ack()


class PartedStore(MemoryStore):
    """Refuses to renew the leases of the actors in `silent`, as if they were stopped."""

    def __init__(self):
        super().__init__()
        self.silent = set()

    async def lease(self, name, token, value, ttl_s):
        if name in self.silent:
            raise StoreUnavailable("stopped")
        return await super().lease(name, token, value, ttl_s)


@asynccontextmanager
async def kernels():
    network, store = MemoryNetwork(), PartedStore()

    async def start(actor_class):
        name, incarnation = f"{actor_class.role}-1", await store.increment("incarnation")
        run, log = RunInfo("test", Path("unused"), 7, 1), logger("rubato.test")
        transport = MemoryTransport(Identity("test", name, incarnation), network)
        kernel = Kernel(
            actor_class, ActorConfig(), name=name, incarnation=incarnation, run=run,
            transport=transport, store=store, blobs=MemoryBlobStore(), log=log,
        )  # fmt: skip
        actor = kernel.build()
        serving.append(tasks.create_task(kernel.serve(), name=name))
        await kernel.ready.wait()
        return kernel, actor

    serving = []
    async with asyncio.TaskGroup() as tasks:
        yield start, store, network
        for task in serving:
            task.cancel()


async def until(kernel, role, names, within_s):
    async with asyncio.timeout(within_s):
        while kernel.directory.ready(role) != names:
            await kernel.directory.change()


def test_an_actor_that_was_stopped_past_its_lease_is_seen_again_at_once():
    async def main():
        async with kernels() as (start, store, _):
            await start(Server)
            client, _ = await start(Client)
            store.silent.add("actor/server-1")
            await until(client, "server", (), LEASE_TTL_S + 2 * RELIST_S)

            store.silent.clear()

            await until(client, "server", ("server-1",), 3.0)

    run_virtual(main)


def test_an_actor_whose_link_broke_though_it_lives_is_seen_again_within_seconds():
    async def main():
        async with kernels() as (start, _, _network):
            server, _ = await start(Server)
            client, _ = await start(Client)
            address = client.directory.find("server-1").address
            await asyncio.sleep(7.3)

            client._down(address, "the link broke")
            await until(client, "server", (), 1.0)

            await until(client, "server", ("server-1",), 6.0)
            assert client.directory.find("server-1").incarnation == server.incarnation

    run_virtual(main)


def test_an_actor_that_died_is_not_taken_for_living_because_its_lease_still_runs():
    async def main():
        async with kernels() as (start, store, _):
            await start(Server)
            client, _ = await start(Client)
            await asyncio.sleep(7.3)
            store.silent.add("actor/server-1")

            client._down(client.directory.find("server-1").address, "the link broke")
            await until(client, "server", (), 1.0)
            await asyncio.sleep(LEASE_TTL_S - 1.0)

            assert client.directory.ready("server") == ()

    run_virtual(main)


def test_the_end_of_the_job_is_told_to_a_node_agent_that_was_away():
    async def main():
        async with kernels() as (start, _, _):
            server, _ = await start(Server)
            server.finish("trained 9 steps")
            await asyncio.sleep(100.0)

            _, node = await start(Node)
            await node.told.wait()

            assert node.heard == ["trained 9 steps"]

    run_virtual(main)
