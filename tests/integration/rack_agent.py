"""A node agent in a rack of its own, for test_fabric_testbed: `serve KEYS ADDRESS SIZE` has a blob, `pull KEYS ADDRESS TOLD` fetches it
once per line read."""

import asyncio
import json
import os
import sys
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec

from rubato.bus.keys import Keys
from rubato.bus.link import Identity
from rubato.bus.zmq import ZmqTransport
from rubato.runtime.actor import RunInfo
from rubato.runtime.blobs.blob_messages import NotPulled, PullBlob
from rubato.runtime.blobs.hosts import HostBlobs
from rubato.runtime.config import ActorConfig
from rubato.runtime.kernel import Kernel
from rubato.runtime.memory import MemoryBlobStore, MemoryStore
from rubato.runtime.observe.log import logger
from rubato.runtime.registry import ActorRecord


async def serve(keys: Keys, address: str, size: str) -> None:
    store = MemoryBlobStore()
    info = await store.put("weights", 1, 1, [os.urandom(int(size))])
    kernel, transport = agent("node-1", keys, address, store)
    async with served(kernel):
        print(json.dumps([transport.address, *info]), flush=True)
        await line()


async def pull(keys: Keys, address: str, told: str) -> None:
    source, *info = json.loads(told)
    while await line():
        kernel, _ = agent("node-2", keys, address, MemoryBlobStore())  # a new one each time: what was pulled would stay
        puller = kernel.build()
        async with served(kernel):
            kernel.directory.add(ActorRecord("node-1", "node", source, 1, 0, "there", "ready"))
            began = asyncio.get_running_loop().time()
            reply = await puller.pull_blob(PullBlob(*info, ("node-1",)))
            took_s = asyncio.get_running_loop().time() - began
            print(reply.why if isinstance(reply, NotPulled) else took_s, flush=True)


def agent(name: str, keys: Keys, address: str, store: MemoryBlobStore) -> tuple[Kernel, ZmqTransport]:
    transport = ZmqTransport(Identity("racks", name, 1), f"tcp://{address}:0", keys=keys)
    kernel = Kernel(
        HostBlobs,
        ActorConfig(),
        name=name,
        incarnation=1,
        run=RunInfo("racks", Path("run"), 1, 1),
        transport=transport,
        store=MemoryStore(),
        blobs=store,
        log=logger("rubato.test"),
    )
    return kernel, transport


@asynccontextmanager
async def served(kernel: Kernel):
    async with asyncio.TaskGroup() as tasks:
        serving = tasks.create_task(kernel.serve())
        await kernel.ready.wait()
        yield
        serving.cancel()


async def line() -> str:
    return await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)


if __name__ == "__main__":
    play, keys_file, *rest = sys.argv[1:]
    found = msgspec.json.decode(Path(keys_file).read_bytes(), type=Keys)
    asyncio.run({"serve": serve, "pull": pull}[play](found, *rest))
