"""The SampleBuffer actor on a Redis of its own, AOF everysec: tickets, 16 KiB trajectories, claims and commits over the bus.

Three processes, as in a job: Redis, the buffer under its kernel, and here one actor that stands for environment manager and trainer.
A put is acknowledged once it is durable; each step of 64 samples is claimed, advanced and committed.
"""

import argparse
import asyncio
import multiprocessing
import sys
import tempfile
from array import array
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import uvloop
from load import Figures, now_ns, rate, report

from rubato.actors.config import StalenessSection, TrainSection
from rubato.actors.messages.generation import VersionSpan
from rubato.actors.messages.samples import Admit, Advance, Batch, Claim, Commit, DrawTerm, Put, Segment, Ticket, Trajectory
from rubato.actors.samples.buffer import SampleBuffer
from rubato.bus.link import Identity
from rubato.bus.zmq import ZmqTransport
from rubato.runtime.actor import Actor, RunInfo
from rubato.runtime.config import ActorConfig
from rubato.runtime.courier import Ref
from rubato.runtime.kernel import Kernel
from rubato.runtime.memory import MemoryBlobStore
from rubato.runtime.observe.log import logger
from rubato.runtime.store.embedded import EmbeddedRedis
from rubato.runtime.store.redis import RedisStore

STEPS, BATCH_GROUPS, GROUP = 32, 8, 8
SAMPLES = STEPS * BATCH_GROUPS * GROUP
TOKENS = 1820
"""Nine bytes each: 16 KiB per trajectory."""

CALLERS = 32
TIMEOUT_S = 60.0


class Manager(Actor):
    role = "env_manager"


def serve(folder: str, url: str) -> None:
    """The buffer's process; ends when it is told to."""
    config = SampleBuffer.Config(
        staleness=StalenessSection(alpha=STEPS - 1), train=TrainSection(batch_groups=BATCH_GROUPS, group_size=GROUP)
    )
    store = RedisStore(url, "bench")

    async def kernel() -> None:
        await _kernel(SampleBuffer, config, "sample_buffer-1", 1, Path(folder), store).serve()

    uvloop.run(kernel())


def _kernel(actor: type[Actor], config: ActorConfig, name: str, incarnation: int, folder: Path, store: RedisStore) -> Kernel:
    return Kernel(
        actor,
        config,
        name=name,
        incarnation=incarnation,
        run=RunInfo("bench", folder, 0, STEPS, window_s=2.0),
        transport=ZmqTransport(Identity("bench", name, incarnation), f"ipc://{folder}/{name}"),
        store=store,
        blobs=MemoryBlobStore(),
        log=logger("bench"),
    )


async def measure(folder: Path) -> Figures:
    """Samples per second through the actor: put, and claim with commit."""
    server = EmbeddedRedis(folder, "everysec")
    url = await server.start()
    buffer = multiprocessing.get_context("spawn").Process(target=serve, args=(str(folder), url))
    buffer.start()
    kernel = _kernel(Manager, ActorConfig(), "env_manager-1", 2, folder, RedisStore(url, "bench"))
    try:
        async with asyncio.TaskGroup() as tasks:
            serving = tasks.create_task(kernel.serve())
            await kernel.ready.wait()
            ref = kernel.ref("sample_buffer-1")
            figures = {"actor_put_s": await _put(ref), "actor_claim_commit_s": await _claim(ref)}
            kernel.stop()
            await serving
    finally:
        buffer.terminate()
        await asyncio.to_thread(buffer.join)
        await server.stop()
    return figures


async def _put(ref: Ref) -> float:
    tickets: list[Ticket] = []
    while len(tickets) < SAMPLES:
        reply = await ref.ask(Admit(SAMPLES - len(tickets), "env_manager-1", 2), timeout=TIMEOUT_S)
        tickets += reply.tickets
    work = iter(tickets)

    async def put() -> None:
        for ticket in work:
            stored = await ref.ask(Put(_trajectory(ticket)), timeout=TIMEOUT_S)
            if stored.fate:
                raise RuntimeError(f"a sample ended as {stored.fate}")

    began = now_ns()
    async with asyncio.TaskGroup() as tasks:
        for _ in range(CALLERS):
            tasks.create_task(put())
    return rate(SAMPLES, began)


async def _claim(ref: Ref) -> float:
    term = (await ref.ask(DrawTerm(1, 0), timeout=TIMEOUT_S)).term
    began, seen = now_ns(), 0
    for step in range(1, STEPS + 1):
        batch = await ref.ask(Claim(step, term, BATCH_GROUPS), timeout=TIMEOUT_S)
        if not isinstance(batch, Batch):
            raise RuntimeError(f"step {step}: {batch.why}")
        seen += sum(map(len, batch.groups))
        await ref.ask(Advance(step, term), timeout=TIMEOUT_S)
        await ref.ask(Commit(step, term), timeout=TIMEOUT_S)
    return rate(seen, began)


def _trajectory(ticket: Ticket) -> Trajectory:
    segment = Segment(tokens=_TOKENS, mask=_MASK, logprobs=_LOGPROBS, spans=(VersionSpan(ticket.version, 1, TOKENS),))
    return Trajectory(ticket=ticket, segments=(segment,), reward=1.0, turns=3, truncated=False, wall_s=0.25)


_TOKENS = array("i", range(TOKENS)).tobytes()
_MASK = bytes([0] + [1] * (TOKENS - 1))
_LOGPROBS = array("f", [0.5] * TOKENS).tobytes()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", required=True)
    with tempfile.TemporaryDirectory() as temporary:
        report(parser.parse_args().json, uvloop.run(measure(Path(temporary))))
