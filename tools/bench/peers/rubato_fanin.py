"""Many connections from one client process to one receiver: each with its own link and credit, all in one event loop."""

import argparse
import asyncio
import multiprocessing
import os
import sys
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import msgspec
import uvloop
from load import IN_FLIGHT, PAYLOAD, Figures, now_ns, rate, report
from rubato_actors import TIMEOUT_S, Generate, serve

from rubato.bus.link import Identity
from rubato.bus.zmq import ZmqTransport
from rubato.runtime.courier import Courier, Ref, current_trace
from rubato.runtime.messages import Drain
from rubato.runtime.observe.figures import Waits
from rubato.runtime.registry import ActorRecord, Directory

REQUESTS = 60_000


async def measure(folder: Path, peers: int) -> Figures:
    """Requests/s with 256 in flight over `peers` connections, and the p99 of one request among them."""
    current_trace.set(os.urandom(16))
    ours, theirs = multiprocessing.Pipe()
    receiver = multiprocessing.get_context("spawn").Process(target=serve, args=(str(folder), f"ipc://{folder}/receiver", theirs))
    receiver.start()
    record = msgspec.msgpack.decode(await asyncio.to_thread(ours.recv_bytes), type=ActorRecord)
    async with AsyncExitStack() as stack, asyncio.TaskGroup() as tasks:
        refs: list[Ref] = []
        sweeps: list[asyncio.Task[None]] = []
        directory = Directory()
        directory.add(record)
        for number in range(peers):
            name = f"sender-{number + 1}"
            transport = ZmqTransport(Identity("bench", name, 3), f"ipc://{folder}/{name}")
            courier = Courier(transport, name, Waits())
            await transport.start(courier.arrived, lambda peer, reason, _, courier=courier: courier.lost(peer, reason))  # type: ignore[arg-type]
            stack.push_async_callback(transport.close)
            sweeps.append(tasks.create_task(courier.sweep()))
            refs.append(Ref("receiver-1", courier, directory))
        for ref in refs:
            await ref.ask(Generate(PAYLOAD, 1, 0.7), timeout=TIMEOUT_S)
        figures = await _all_at_once(refs)
        await refs[0].ask(Drain(), timeout=TIMEOUT_S, retry=False)
        for sweep in sweeps:
            sweep.cancel()
    await asyncio.to_thread(receiver.join)
    return figures


async def _all_at_once(refs: list[Ref]) -> Figures:
    askers = max(1, IN_FLIGHT // len(refs)) * len(refs)
    share, took = REQUESTS // askers, list[int]()
    request = Generate(PAYLOAD, 1, 0.7)

    async def ask(ref: Ref) -> None:
        for _ in range(share):
            began = now_ns()
            await ref.ask(request, timeout=TIMEOUT_S)
            took.append(now_ns() - began)

    began = now_ns()
    async with asyncio.TaskGroup() as tasks:
        for number in range(askers):
            tasks.create_task(ask(refs[number % len(refs)]))
    figure = rate(share * askers, began)
    return {"fanin_req_s": figure, "fanin_p99_us": sorted(took)[len(took) * 99 // 100] / 1e3}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", required=True)
    parser.add_argument("--peers", type=int, default=64)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        report(arguments.json, uvloop.run(measure(Path(temporary), arguments.peers)))
