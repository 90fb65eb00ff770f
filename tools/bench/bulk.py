"""How fast arrays move: `python tools/bench/bulk.py [--runs N] [--json FILE]`.

One host: a publisher actor copies a 64 MB array into the blobs of its host and asks N reader actors, each a process of its own, to look
at it; a reader maps it, touches every page and answers. A run lasts from the publisher's `put` to the last answer. GB/s = bytes
mapped by all readers / time. The blobs' agent, the messages and the drop tokens are the product's; digests only where the row says so.

Two hosts: a node agent pulls a 64 MB blob from another over TCP on the loopback, in 4 MiB pieces of which eight are under way, into memory
that is there already; in the clear or with CURVE. Both ends share this machine's cores, which two hosts would not.
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import ClassVar

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import msgspec
import numpy as np

from rubato.bus.keys import Keys, new_keys
from rubato.bus.link import Identity
from rubato.bus.message import Ack, Request
from rubato.bus.zmq import ZmqTransport
from rubato.runtime.actor import Actor, RunInfo, handler
from rubato.runtime.blobs.blob import BlobInfo, Draft
from rubato.runtime.blobs.client import BlobClient
from rubato.runtime.blobs.hosts import HostBlobs, Pull
from rubato.runtime.blobs.server import BlobServer
from rubato.runtime.config import ActorConfig
from rubato.runtime.kernel import Kernel
from rubato.runtime.memory import MemoryBlobStore, MemoryStore
from rubato.runtime.observe.log import logger
from rubato.runtime.registry import ActorRecord

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

    async def measure(self, readers: Sequence[str], size: int, runs: int, *, check: bool) -> list[float]:
        """Seconds of each run."""
        array = np.ones(size // 8, np.uint64)
        refs = [self.ref(name) for name in readers]
        took: list[float] = []
        for version in range(1, runs + WARM_UP + 1):
            array[0] = version
            began = perf_counter()
            await self.blobs.put("bulk", version, 0, [array.data.cast("B")], checked=check)
            async with asyncio.TaskGroup() as tasks:
                for ref in refs:
                    tasks.create_task(ref.ask(Look(version, check), timeout=60))
            took.append(perf_counter() - began)
        return took[WARM_UP:]


def measure(readers: int, size: int = SIZE, runs: int = 30, *, check: bool = False) -> float:
    """GB/s over all readers on this host, the median run. `check` makes and checks digests."""
    with tempfile.TemporaryDirectory(prefix="rubato-bulk-") as folder:
        return asyncio.run(_publish(Path(folder), readers, size, runs, check=check))


class Puller(HostBlobs):
    async def measure(self, source: str, info: BlobInfo, runs: int, *, check: bool) -> list[float]:
        """Seconds of each pull, into one draft that is used again and again."""

        async def unshared(written: BlobInfo) -> BlobInfo:
            return written

        room = Draft(info, np.zeros(info.size_bytes, np.uint8).data, unshared)
        took: list[float] = []
        for _ in range(runs + 2):
            pull = Pull(info, room, lambda source, request: self.ref(source).ask(request, timeout=30), self.offload, check=check)
            began = perf_counter()
            await pull.run([source])
            took.append(perf_counter() - began)
        return took[2:]


def measure_tcp(size: int = SIZE, runs: int = 10, *, curve: bool = False, check: bool = False) -> float:
    """GB/s of a pull over TCP on the loopback, the median run."""
    with tempfile.TemporaryDirectory(prefix="rubato-bulk-") as folder:
        return asyncio.run(_pull(Path(folder), size, runs, curve=curve, check=check))


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
            await _line(process)
        result = await _start(stack, "publish", str(folder), str(size), str(runs), str(int(check)), *names)
        took = json.loads(await _line(result))
    return readers * size / median(took) / 1e9


async def _pull(folder: Path, size: int, runs: int, *, curve: bool, check: bool) -> float:
    if curve:
        path = folder / "keys.json"
        path.touch(mode=0o600)
        path.write_bytes(msgspec.json.encode(new_keys()))
    async with AsyncExitStack() as stack:
        source = await _start(stack, "serve", str(folder), str(size))
        told = (await _line(source)).decode().strip()
        result = await _start(stack, "pull", str(folder), str(runs), str(int(check)), told)
        took = json.loads(await _line(result))
    return size / median(took) / 1e9


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


async def _line(process: asyncio.subprocess.Process) -> bytes:
    assert process.stdout is not None
    return await process.stdout.readline()


async def _child(role: str, folder: Path, *args: str) -> None:
    await {"read": _read, "publish": _put, "serve": _serve, "pull": _fetch}[role](folder, *args)


async def _read(folder: Path, name: str) -> None:
    await _stay(_kernel(Reader, name, folder), "ready")


async def _serve(folder: Path, size: str) -> None:
    store = MemoryBlobStore()
    info = await store.put("bulk", 1, 0, [os.urandom(int(size))])
    transport = _transport("node-1", folder, "tcp://127.0.0.1:0")
    kernel = _kernel(HostBlobs, "node-1", folder, store=store, transport=transport)
    await _stay(kernel, lambda: json.dumps([transport.address, *info]))


async def _put(folder: Path, size: str, runs: str, check: str, *names: str) -> None:
    kernel = _kernel(Publisher, "publisher-1", folder)
    publisher = kernel.build()
    async with _served(kernel):
        for name in names:
            kernel.directory.add(ActorRecord(name, "reader", f"ipc://{folder}/{name}", 1, 0, "here", "ready"))
        print(json.dumps(await publisher.measure(names, int(size), int(runs), check=bool(int(check)))), flush=True)


async def _fetch(folder: Path, runs: str, check: str, told: str) -> None:
    address, *info = json.loads(told)
    transport = _transport("node-2", folder, "tcp://127.0.0.1:0")
    kernel = _kernel(Puller, "node-2", folder, store=MemoryBlobStore(), transport=transport)
    puller = kernel.build()
    async with _served(kernel):
        kernel.directory.add(ActorRecord("node-1", "node", address, 1, 0, "there", "ready"))
        print(json.dumps(await puller.measure("node-1", BlobInfo(*info), int(runs), check=bool(int(check)))), flush=True)


@asynccontextmanager
async def _served(kernel: Kernel) -> AsyncGenerator[None]:
    async with asyncio.TaskGroup() as tasks:
        serving = tasks.create_task(kernel.serve())
        await kernel.ready.wait()
        yield
        serving.cancel()


async def _stay(kernel: Kernel, said: str | Callable[[], str]) -> None:
    """Serve until the parent hangs up or kills us."""
    async with _served(kernel):
        print(said if isinstance(said, str) else said(), flush=True)
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


def _transport(name: str, folder: Path, address: str) -> ZmqTransport:
    path = folder / "keys.json"
    keys = msgspec.json.decode(path.read_bytes(), type=Keys) if path.exists() else None
    return ZmqTransport(Identity("bulk", name, 1), address, keys=keys)


def _kernel(
    actor_class: type[Actor], name: str, folder: Path, *, store: MemoryBlobStore | None = None, transport: ZmqTransport | None = None
) -> Kernel:
    return Kernel(
        actor_class,
        ActorConfig(),
        name=name,
        incarnation=1,
        run=RunInfo("bulk", folder, 1, 1),
        transport=transport or _transport(name, folder, f"ipc://{folder}/{name}"),
        store=MemoryStore(),
        blobs=store or BlobClient(folder / "blobs.sock"),
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
    for curve in (False, True):
        for check in (False, True):
            name = "tcp" + ("_curve" if curve else "") + ("_checked" if check else "")
            rows[name] = measure_tcp(runs=max(3, given.runs // 3), curve=curve, check=check)
            print(f"{name:24} {rows[name]:6.2f} GB/s", flush=True)
    if given.json:
        given.json.write_text(json.dumps(rows, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
