"""A host that joined, with one GPU: whoever asks for it at the same time, one gets it, and the first host names one actor alone."""

import asyncio

from rubato.bus.link import Identity
from rubato.bus.memory import MemoryNetwork, MemoryTransport
from rubato.planning.devices import HostResources
from rubato.runtime.actor import Actor, RunInfo, handler
from rubato.runtime.config import ActorConfig
from rubato.runtime.config.compose import from_mapping
from rubato.runtime.host import Ending
from rubato.runtime.kernel import Kernel
from rubato.runtime.launch.agent import Hosting, NodeAgent
from rubato.runtime.launch.agent_messages import AddActors, Added, NotAdded
from rubato.runtime.memory import MemoryBlobStore, MemoryStore
from rubato.runtime.observe.log import logger
from rubato.runtime.places import HostPlaces
from tests.virtual import virtual


class Worker(Actor):
    role = "worker"


class FirstHost(Actor):
    """Takes its time to give names."""

    role = "node"

    def __init__(self, config, kernel):
        super().__init__(config, kernel)
        self.named = []

    @handler(concurrency=8)
    async def add(self, request: AddActors) -> Added | NotAdded:
        await asyncio.sleep(1.0)
        self.named.append(f"worker-{len(self.named) + 1}")
        return Added((self.named[-1],))


class Running:
    """An Instance of nothing, and the back end that starts it."""

    def __init__(self):
        self._over = asyncio.Event()

    async def start(self, name):
        return Running()

    def drain(self):
        self._over.set()

    kill = drain

    def is_stopped(self):
        return False

    async def ended(self):
        await self._over.wait()
        return Ending("exit 0")


class Screen:
    def progress(self, message): ...
    def notice(self, text, *, good=False): ...
    def actors(self, ready, wanted): ...


@virtual
async def test_two_that_ask_for_the_last_place_at_once(tmp_path):
    job = from_mapping({"actors": {"worker": {"class": f"{__name__}:Worker", "pools": {"a": {"count": 0, "gpus": 1}}}}})
    places = HostPlaces(job.actors, HostResources(frozenset(), ("0",), ()))
    store, network = MemoryStore(), MemoryNetwork()
    incarnations = iter(range(1, 9))

    def kernel(actor_class, config, name):
        incarnation = next(incarnations)
        return Kernel(
            actor_class, config, name=name, incarnation=incarnation, run=RunInfo("r", tmp_path, 1, 1), store=store,
            transport=MemoryTransport(Identity("r", name, incarnation), network), blobs=MemoryBlobStore(),
            log=logger("test"), node=name,
        )  # fmt: skip

    kernels = [kernel(FirstHost, ActorConfig(), "node-1"), kernel(NodeAgent, Hosting(job, Screen(), Running(), places=places), "node-2")]
    first, second = (each.build() for each in kernels)
    async with asyncio.TaskGroup() as tasks:
        for each in kernels:
            tasks.create_task(each.serve())
            await each.ready.wait()
        ask = second.ref("node-2").ask
        replies = await asyncio.gather(*(ask(AddActors("worker", 1, pool="a"), timeout=30) for _ in range(2)))
        await second.host.drain("worker-1", 5.0)
        again = await ask(AddActors("worker", 1, pool="a"), timeout=30)
        second.host.kill_all()
        for each in kernels:
            each.stop()

    why = "can't add 1 worker to the pool a: this host has 0 of 1 GPUs free, and each process takes 1."
    assert sorted(replies, key=str) == [Added(("worker-1",)), NotAdded(why)]
    assert (again, first.named) == (Added(("worker-2",)), ["worker-1", "worker-2"])
