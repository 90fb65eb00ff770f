"""Engines whose prompts are prefilled on another host: the cache's bytes come from there first, and count as all messages do."""

import asyncio

import numpy as np
import pytest

from rubato.actors.engines.section import EngineSection, ScriptedSection
from rubato.actors.messages.generation import Completion, Generate, Sampling
from rubato.actors.messages.weights import WeightsPublished
from rubato.actors.scripted.remote_prefill import PrefillSection, RemotePrefillWorker
from rubato.bus.link import Identity
from rubato.bus.memory import MemoryNetwork, MemoryTransport
from rubato.planning.engine_info import WeightsNeed
from rubato.runtime.actor import Actor, RunInfo, handler
from rubato.runtime.blobs.blob_messages import NotPulled, PullBlob, Pulled
from rubato.runtime.config import ActorConfig
from rubato.runtime.kernel import NODE, Kernel
from rubato.runtime.memory import MemoryBlobStore, MemoryStore
from rubato.runtime.messages import CountBytes
from rubato.runtime.observe.log import logger
from tests.virtual import virtual

PROMPT = np.arange(10, dtype="<i4").tobytes()
HEADER = b'{"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
IMAGE = [len(HEADER).to_bytes(8, "little"), HEADER, bytes(4)]


class Agent(Actor):
    """A node agent whose host has every blob already."""

    role = "node"

    @handler
    async def pull_blob(self, request: PullBlob) -> Pulled | NotPulled:
        return Pulled(())


class Client(Actor):
    role = "client"


class Scene:
    def __init__(self, tasks, folder):
        self.tasks, self.folder, self.network, self.store = tasks, folder, MemoryNetwork(), MemoryStore()
        self.blobs, self.actors, self.serving = {}, {}, []

    async def start(self, cls, config, name, node=NODE):
        kernel = Kernel(
            cls,
            config,
            name=name,
            incarnation=1,
            run=RunInfo("test", self.folder, 7, 1),
            transport=MemoryTransport(Identity("test", name, 1), self.network),
            store=self.store,
            blobs=self.blobs.setdefault(node, MemoryBlobStore()),
            log=logger("rubato.test"),
            node=node,
        )
        self.actors[name] = kernel.build()
        self.serving.append(self.tasks.create_task(kernel.serve(), name=name))
        await kernel.ready.wait()

    async def generate(self, engine, request_id, min_version=0):
        request = Generate(request_id, request_id, PROMPT, Sampling(2), WeightsNeed(min_version))
        return await self.actors["client-1"].ref(engine).ask(request, timeout=60)

    async def publish(self, version):
        for blobs in self.blobs.values():
            await blobs.put("weights", version, 1, IMAGE)
        for name in ("engine-1", "engine-2", "engine-3"):
            await self.actors["client-1"].ref(name).tell(WeightsPublished(version, 1, "", 0))
        await asyncio.sleep(1)


@pytest.fixture
def scene(tmp_path):
    def run(play):
        @virtual
        async def main():
            async with asyncio.TaskGroup() as tasks:
                made = Scene(tasks, tmp_path)
                await made.start(Client, ActorConfig(), "client-1")
                scripted = EngineSection(kind="scripted", scripted=ScriptedSection(token_s=0.01))
                config = RemotePrefillWorker.Config(engine=scripted, prefill=PrefillSection(kv_bytes_per_token=100))
                for number, node in enumerate((NODE, "node-2", "node-3"), 1):
                    if node != NODE:
                        await made.start(Agent, ActorConfig(), node, node)
                    await made.start(RemotePrefillWorker, config, f"engine-{number}", node)
                await asyncio.sleep(1)
                await play(made)
                for task in made.serving:
                    task.cancel()

        main()

    return run


def test_a_rollouts_caches_come_from_the_other_host_and_count_as_its_bytes(scene):
    async def play(made):
        for number in range(3):
            assert isinstance(await made.generate("engine-2", f"r{number}"), Completion)

        counted = await made.actors["client-1"].ref("engine-2").ask(CountBytes(), timeout=5)

        assert 3 * 10 * 100 <= counted.came["engine-3"] < 3 * 10 * 100 + 100
        assert 0 < counted.sent["engine-3"] < 100

    scene(play)


def test_the_launchers_host_prefills_for_itself(scene):
    async def play(made):
        assert isinstance(await made.generate("engine-1", "r"), Completion)

        counted = await made.actors["client-1"].ref("engine-1").ask(CountBytes(), timeout=5)

        assert not counted.came.keys() & {"engine-2", "engine-3"}

    scene(play)


def test_nothing_is_fetched_before_both_ends_have_the_weights_of_the_request(scene):
    async def play(made):
        asked = made.tasks.create_task(made.generate("engine-2", "r", min_version=1))
        await asyncio.sleep(5)
        assert not asked.done()
        await made.publish(1)
        assert isinstance(await asked, Completion)

    scene(play)
