"""How fast arrays move: `python tools/bench/bulk.py [--runs N] [--json FILE]`.

One host: a publisher actor copies a 64 MB array into the blobs of its host and asks N reader actors, each a process of its own, to look
at it; a reader maps it, touches every page and answers. A run lasts from the publisher's `put` to the last answer. GB/s = bytes
mapped by all readers / time. The blobs' agent, the messages and the drop tokens are the product's; digests only where the row says so.
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import ClassVar

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np

from bus.message import Ack, Request
from bus.transport import Identity
from bus.zmq import ZmqTransport
from runtime.actor import Actor, ActorConfig, RunInfo, handler
from runtime.blob_agent import BlobServer
from runtime.blob_client import BlobClient
from runtime.kernel import Kernel
from runtime.observe.log import logger
from runtime.registry import ActorRecord
from runtime.store.memory import MemoryStore

SIZE = 64 * 1024 * 1024
PAGE = 4096
WARM_UP = 4
"""Rounds before the clock counts: segments are mapped and their pages there."""


class Look(Request[Ack], frozen=True):
    """Map this version and touch each page of it."""

    version: int
    check: bool
    idempotent: ClassVar[bool] = True


class Reader(Actor):
    role = "reader"

    @handler
    async def look(self, request: Look) -> Ack:
        _, view = await self.blobs.get("bulk", request.version, check=request.check)
        array = np.frombuffer(view, np.uint64)
        if array[0] != request.version or int(array[:: PAGE // 8].sum()) < request.version:
            raise ValueError(f"version {request.version} does not hold what was put")
        return Ack()


class Publisher(Actor):
    role = "publisher"

    async def measure(self, readers: list[str], size: int, runs: int, *, check: bool) -> list[float]:
        """Seconds of each run."""
        array = np.ones(size // 8, np.uint64)
        refs = [self.ref(name) for name in readers]
        took: list[float] = []
        for version in range(1, runs + WARM_UP + 1):
            array[0] = version
            began = perf_counter()
            await self.blobs.put("bulk", version, 0, [memoryview(array).cast("B")], checked=check)
            async with asyncio.TaskGroup() as tasks:
                for ref in refs:
                    tasks.create_task(ref.ask(Look(version, check), timeout=60))
            took.append(perf_counter() - began)
        return took[WARM_UP:]


def measure(readers: int, size: int = SIZE, runs: int = 30, *, check: bool = False) -> float:
    """GB/s over all readers on this host, the median run. `check` makes and checks digests."""
    with tempfile.TemporaryDirectory(prefix="rubato-bulk-") as folder:
        return asyncio.run(_publish(Path(folder), readers, size, runs, check=check))


def memcpy_gb_s(size: int = SIZE, runs: int = 20) -> float:
    """What one thread copies, into memory that is there already: the median run."""
    source, target = np.ones(size // 8, np.uint64), np.ones(size // 8, np.uint64)
    took: list[float] = []
    for _ in range(runs):
        began = perf_counter()
        np.copyto(target, source)
        took.append(perf_counter() - began)
    return size / median(took) / 1e9


async def _publish(folder: Path, readers: int, size: int, runs: int, *, check: bool) -> float:
    names = [f"reader-{n + 1}" for n in range(readers)]
    async with AsyncExitStack() as stack:
        server = BlobServer(folder / "blobs.sock")
        await server.start()
        stack.push_async_callback(server.close)
        processes = [await _start(stack, "read", str(folder), name) for name in names]
        for process in processes:
            await process.stdout.readline()
        result = await _start(stack, "publish", str(folder), str(size), str(runs), str(int(check)), *names)
        took = json.loads(await result.stdout.readline())
    return readers * size / median(took) / 1e9


async def _start(stack: AsyncExitStack, *args: str) -> asyncio.subprocess.Process:
    process = await asyncio.create_subprocess_exec(
        sys.executable, __file__, "--child", *args, stdin=subprocess.PIPE, stdout=subprocess.PIPE, limit=1 << 20
    )

    async def end() -> None:
        if process.returncode is None:
            process.kill()
        await process.wait()

    stack.push_async_callback(end)
    return process


async def _child(role: str, folder: Path, *args: str) -> None:
    if role == "read":
        kernel = _kernel(Reader, args[0], folder, [])
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(kernel.serve())
            await kernel.ready.wait()
            print("ready", flush=True)
            await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
        return
    size, runs, check = int(args[0]), int(args[1]), bool(int(args[2]))
    names = list(args[3:])
    kernel = _kernel(Publisher, "publisher-1", folder, names)
    publisher = kernel.build()
    async with asyncio.TaskGroup() as tasks:
        serving = tasks.create_task(kernel.serve())
        await kernel.ready.wait()
        for name in names:
            kernel.directory.add(ActorRecord(name, "reader", f"ipc://{folder}/{name}", 1, 0, "here", "ready"))
        print(json.dumps(await publisher.measure(names, size, runs, check=check)), flush=True)
        serving.cancel()


def _kernel(actor_class: type[Actor], name: str, folder: Path, _peers: list[str]) -> Kernel:
    return Kernel(
        actor_class,
        ActorConfig(),
        name=name,
        incarnation=1,
        run=RunInfo("bulk", folder, 1, 1),
        transport=ZmqTransport(Identity("bulk", name, 1), f"ipc://{folder}/{name}"),
        store=MemoryStore(),
        blobs=BlobClient(folder / "blobs.sock"),
        log=logger("bench"),
    )


def main() -> int:
    if sys.argv[1:2] == ["--child"]:
        import uvloop

        asyncio.Runner(loop_factory=uvloop.new_event_loop).run(_child(sys.argv[2], Path(sys.argv[3]), *sys.argv[4:]))
        return 0
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=30)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    copied = memcpy_gb_s()
    rows = {"memcpy": copied}
    print(f"{os.cpu_count()} cores; memcpy, one thread: {copied:.1f} GB/s")
    for readers in (1, 4):
        for check in (False, True):
            name = f"shared_1to{readers}" + ("_checked" if check else "")
            rows[name] = measure(readers, runs=given.runs, check=check)
            print(f"{name:24} {rows[name]:6.1f} GB/s  {rows[name] / copied:5.2f} x memcpy", flush=True)
    if given.json:
        given.json.write_text(json.dumps(rows, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
