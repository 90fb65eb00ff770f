"""Rubato: an actor that asks and an actor that answers, each under its kernel in its own process, over the bus between processes.

Nothing is left out for the benchmark: typed bodies, credit, deadlines, incarnations, a trace id in
every envelope, per-actor metrics, the heartbeats of both kernels.
"""

import argparse
import asyncio
import importlib.util
import multiprocessing
import os
import sys
import tempfile
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import ClassVar

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import msgspec
import uvloop
from load import PAYLOAD, WARM_UP, Cpu, Figures, now_ns, rate, report, requests, round_trips

from rubato.bus.keys import Keys, new_keys
from rubato.bus.link import Identity
from rubato.bus.message import Message, Request
from rubato.bus.zmq import ZmqTransport
from rubato.runtime.actor import Actor, RunInfo, handler
from rubato.runtime.config import ActorConfig
from rubato.runtime.courier import Ref, current_trace
from rubato.runtime.kernel import Kernel
from rubato.runtime.memory import MemoryBlobStore, MemoryStore
from rubato.runtime.messages import Drain
from rubato.runtime.observe.log import logger
from rubato.runtime.registry import LEASE_TTL_S, ActorRecord, MembershipEvent, list_actors

ROUND_TRIPS, REQUESTS, MESSAGES, BULKS = 5_000, 60_000, 200_000, 10
TIMEOUT_S = 30.0


class Generated(Message, frozen=True):
    text: bytes
    version: int


class Generate(Request[Generated], frozen=True):
    """Idempotent, as what a proxy asks of an engine."""

    prompt: bytes
    num: int
    temperature: float
    idempotent: ClassVar[bool] = True


class Note(Message, frozen=True):
    text: bytes
    num: int
    temperature: float


class Counted(Message, frozen=True):
    num: int


class Count(Request[Counted], frozen=True):
    """How many notes came since the last count."""


class Receiver(Actor):
    role = "receiver"

    def __init__(self, config: ActorConfig, kernel: Kernel) -> None:
        super().__init__(config, kernel)
        self.num = 0

    @handler
    async def generate(self, request: Generate) -> Generated:
        return Generated(request.prompt, 7)

    @handler
    async def note(self, message: Note) -> None:
        self.num += 1

    @handler
    async def count(self, request: Count) -> Counted:
        num, self.num = self.num, 0
        return Counted(num)


class Sender(Actor):
    role = "sender"


def serve(folder: str, address: str, tell: Connection) -> None:
    """A process with one receiver; its registry record goes to `tell` once it is ready."""
    uvloop.run(_serve(Path(folder), address, tell))


async def _serve(folder: Path, address: str, tell: Connection) -> None:
    store = MemoryStore()
    kernel = _kernel(Receiver, "receiver-1", folder, address, store)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(kernel.serve())
        await kernel.ready.wait()
        (record,) = await list_actors(store)
        tell.send_bytes(msgspec.msgpack.encode(record))


@asynccontextmanager
async def pair(folder: Path, scheme: str) -> AsyncGenerator[Ref]:
    """A reference to a receiver in another process, held by a sender in this one."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=serve, args=(str(folder), _address(folder, scheme, "receiver"), theirs))
    process.start()
    record = msgspec.msgpack.decode(await asyncio.to_thread(ours.recv_bytes), type=ActorRecord)
    store = MemoryStore()
    kernel = _kernel(Sender, "sender-1", folder, _address(folder, scheme, "sender"), store)
    async with asyncio.TaskGroup() as tasks:
        serving = tasks.create_task(kernel.serve())
        await kernel.ready.wait()
        beat = tasks.create_task(_beat(store, record))
        await store.append("events", msgspec.msgpack.encode(MembershipEvent("ready", record)))
        await kernel.directory.change()
        yield kernel.ref("receiver-1")
        await kernel.ref("receiver-1").ask(Drain(), timeout=TIMEOUT_S, retry=False)
        beat.cancel()
        kernel.stop()
        await serving
    await asyncio.to_thread(process.join)


async def _beat(store: MemoryStore, record: ActorRecord) -> None:
    """Two stores stand for the run's one: the receiver's lease is kept up in the sender's."""
    while True:
        await store.lease(f"actor/{record.name}", record.incarnation, msgspec.msgpack.encode(record), LEASE_TTL_S)
        await asyncio.sleep(LEASE_TTL_S / 3)


def _kernel(actor: type[Actor], name: str, folder: Path, address: str, store: MemoryStore) -> Kernel:
    return Kernel(
        actor,
        ActorConfig(),
        name=name,
        incarnation=3,
        run=RunInfo("bench", folder, 0, 0),
        transport=ZmqTransport(Identity("bench", name, 3), address, keys=_keys(folder)),
        store=store,
        blobs=MemoryBlobStore(),
        log=logger("bench"),
    )


def _address(folder: Path, scheme: str, name: str) -> str:
    return f"ipc://{folder}/{name}" if scheme == "ipc" else "tcp://127.0.0.1:0"


def _keys(folder: Path) -> Keys | None:
    """With a file of keys in the folder, both sides use CURVE."""
    path = folder / "keys.json"
    return msgspec.json.decode(path.read_bytes(), type=Keys) if path.exists() else None


async def measure(folder: Path, scheme: str, only: list[str]) -> Figures:
    """The figures but bulk."""
    current_trace.set(os.urandom(16))
    if scheme == "curve":
        path = folder / "keys.json"
        path.touch(mode=0o600)
        path.write_bytes(msgspec.json.encode(new_keys()))
    async with pair(folder, scheme) as ref:
        request = Generate(PAYLOAD, 1, 0.7)

        async def call() -> Generated:
            return await ref.ask(request, timeout=TIMEOUT_S)

        cpu = Cpu(os.getpid(), *(child.pid or 0 for child in multiprocessing.active_children()))
        figures = await round_trips(call, ROUND_TRIPS)
        figures["rtt_cpu_us"] = cpu.per(WARM_UP + ROUND_TRIPS)
        if not only or "req" in only:
            figures |= {"req_s": await requests(call, REQUESTS), "req_cpu_us": cpu.per(REQUESTS)}
        if not only or "msg" in only:
            figures |= {"msg_s": await _messages(ref), "msg_cpu_us": cpu.per(MESSAGES)}
    return figures


async def _messages(ref: Ref) -> float:
    note = Note(PAYLOAD, 1, 0.7)
    began = now_ns()
    for _ in range(MESSAGES):
        await ref.tell(note)
    counted = await ref.ask(Count(), timeout=TIMEOUT_S)
    if counted.num != MESSAGES:
        raise RuntimeError("rubato lost messages")
    return rate(MESSAGES, began)


def bulk() -> Figures:
    """As `tools/bench/bulk.py` measures it: the blobs of a host, mapped by one reader and by four, each page touched."""
    path = Path(__file__).resolve().parents[1] / "bulk.py"
    spec = importlib.util.spec_from_file_location("bulk", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return {"bulk_1to1_gb_s": module.measure(1, runs=BULKS), "bulk_1to4_gb_s": module.measure(4, runs=BULKS)}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", required=True)
    parser.add_argument("--scheme", default="ipc", choices=["ipc", "tcp", "curve"])
    parser.add_argument("--only", nargs="*", default=[], choices=["rtt", "req", "msg", "bulk"])
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        figures = uvloop.run(measure(Path(temporary), arguments.scheme, arguments.only))
    if not arguments.only or "bulk" in arguments.only:
        figures |= bulk()
    report(arguments.json, figures)
