"""Hosts of a job whose racks are namespaces, for pod_bed: each has a node agent and an engine, in a process of its own in its rack."""

import asyncio
import sys
from collections import Counter
from contextlib import asynccontextmanager
from pathlib import Path
from typing import ClassVar

import msgspec

from rubato.actors import plugins
from rubato.actors.engines.section import EngineSection, PaceSection, ScriptedSection
from rubato.actors.engines.worker import EngineWorker
from rubato.actors.fabric.section import FabricSection
from rubato.bus.keys import Keys
from rubato.bus.link import Identity
from rubato.bus.message import Message, Request
from rubato.bus.zmq import ZmqTransport
from rubato.runtime.actor import RunInfo, handler
from rubato.runtime.blobs.hosts import HostBlobs
from rubato.runtime.config import ActorConfig
from rubato.runtime.kernel import Kernel
from rubato.runtime.memory import MemoryBlobStore
from rubato.runtime.observe.log import logger
from rubato.runtime.store.redis import RedisStore

MODEL = "qwen2-57b-a14b"
"""A mixture of experts: its decode steps take longer with each further request, so that to share them out pays."""
KV_BYTES = 57_344
"""Of one token of that model: what the orchestrator announces, and what its scripted caches weigh."""
ADDRESSES = {f"rack-{number}": f"10.203.9.{number + 1}" for number in range(4)}
PODS = {"pod-0": ("rack-0", "rack-1"), "pod-1": ("rack-2", "rack-3")}
ENGINES = {f"engine-{number + 1}": rack for number, rack in enumerate(ADDRESSES)}
CIRCUIT_MBPS, TRICKLE_MBPS = 200.0, 20.0
FABRIC = FabricSection(
    racks={rack: (address,) for rack, address in ADDRESSES.items()},
    pods=PODS,
    planner="pods",
    testbed="pods",
    ports=16,
    ports_per_endpoint=4,
    link_gbps=CIRCUIT_MBPS / 1e3,
    trickle_mbps=TRICKLE_MBPS,
    reconfiguration_s=0.05,
    tune_timeout_s=0.3,
)
ENGINE = EngineSection(
    kind="scripted",
    num_slots=8,
    max_len=4096,
    stream_every=4,
    prefix_cache=False,
    scripted=ScriptedSection(told_lengths=True, vocab_size=4096, kv_bytes_per_token=KV_BYTES),
    pace=PaceSection(hardware="h20", model=MODEL, degree=4, scale=2.0),
)


class CachesSeen(Message, frozen=True):
    """Bytes of the caches that came from each engine."""

    sizes: tuple[tuple[str, int], ...]


class AskCaches(Request[CachesSeen], frozen=True):
    """To an engine of the bed."""

    idempotent: ClassVar[bool] = True


class Engine(EngineWorker):
    """Counts the caches that come to it."""

    def __init__(self, config, kernel):
        super().__init__(config, kernel)
        self._sizes = Counter()

    def make(self, path):
        made = super().make(path)
        if path == plugins.ENGINE_MOVES:
            fetch = made.caches.fetch

            async def counted(source, request_id, number=0):
                cache = await fetch(source, request_id, number)
                self._sizes[source.name] += len(cache.data) if cache is not None else 0
                return cache

            made.caches.fetch = counted
        return made

    @handler
    async def ask_caches(self, request: AskCaches) -> CachesSeen:
        return CachesSeen(tuple(sorted(self._sizes.items())))


class Host:
    """What runs in one rack: its kernels share the blobs of their host, and the job's Store with all others."""

    def __init__(self, rack: str, url: str, keys: Keys, tasks: asyncio.TaskGroup) -> None:
        self._address, self._keys, self._tasks = ADDRESSES[rack], keys, tasks
        self._number = list(ADDRESSES).index(rack) + 1
        self._store, self._blobs = RedisStore(url, "pods"), MemoryBlobStore()
        self._serving: list[asyncio.Task[None]] = []

    async def start(self, actor_class, name, **sections):
        """The actor, once it is ready."""
        incarnation = await self._store.increment("incarnation")
        identity = Identity("pods", name, incarnation)
        kernel = Kernel(
            actor_class,
            (actor_class.Config or ActorConfig)(**sections),
            name=name,
            incarnation=incarnation,
            run=RunInfo("pods", Path("run"), 7, 1),
            transport=ZmqTransport(identity, "tcp://127.0.0.1:0", public=f"tcp://{self._address}:0", keys=self._keys),
            store=self._store,
            blobs=self._blobs,
            log=logger("rubato.test"),
            node=f"node-{self._number}",
        )
        actor = kernel.build()
        self._serving.append(self._tasks.create_task(kernel.serve(), name=name))
        await kernel.ready.wait()
        return actor

    async def engine(self):
        await self.start(HostBlobs, f"node-{self._number}")
        return await self.start(Engine, f"engine-{self._number}", engine=ENGINE)

    async def end(self):
        for serving in reversed(self._serving):
            serving.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)
        await self._store.close()


@asynccontextmanager
async def host(rack, url, keys_file):
    keys = msgspec.json.decode(Path(keys_file).read_bytes(), type=Keys)
    async with asyncio.TaskGroup() as tasks:
        made = Host(rack, url, keys, tasks)
        try:
            yield made
        finally:
            await made.end()


async def main(rack, url, keys_file):
    """Until the standard input ends."""
    async with host(rack, url, keys_file) as made:
        await made.engine()
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
