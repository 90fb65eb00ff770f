"""The SampleBuffer behind its messages: real kernels on the memory transport."""

import asyncio
from array import array
from contextlib import asynccontextmanager

import msgspec

from rubato.actors.config import SamplesSection, TrainSection
from rubato.actors.messages.generation import VersionSpan
from rubato.actors.messages.samples import Admit, Advance, Batch, Claim, Close, Commit, DrawTerm, PolicyState, Put, Segment, Trajectory
from rubato.actors.samples.buffer import SampleBuffer
from rubato.actors.samples.journal import read_records
from rubato.bus.errors import AskFailed
from rubato.bus.link import Identity
from rubato.bus.memory import MemoryNetwork, MemoryTransport
from rubato.runtime.actor import Actor, RunInfo, handler
from rubato.runtime.config import ActorConfig
from rubato.runtime.kernel import Kernel
from rubato.runtime.memory import MemoryBlobStore, MemoryStore
from rubato.runtime.observe.log import logger

BATCH_GROUPS, GROUP_SIZE, STEPS = 4, 4, 5


class Manager(Actor):
    role = "env_manager"

    def __init__(self, config, kernel):
        super().__init__(config, kernel)
        self.heard = []

    @handler
    async def policy_changed(self, message: PolicyState) -> None:
        self.heard.append(message.version)


@asynccontextmanager
async def job(folder):
    """`await start(actor_class, name, config)` gives (kernel, actor); `await kill(name)` ends it as a signal would."""
    async with asyncio.TaskGroup() as tasks:
        network, store, run = MemoryNetwork(), MemoryStore(), RunInfo("test", folder, 7, STEPS)
        serving = {}

        async def serve(kernel):
            await kernel.serve()

        async def start(actor_class, name, config):
            incarnation = await store.increment("incarnation")
            transport = MemoryTransport(Identity("test", name, incarnation), network)
            kernel = Kernel(
                actor_class,
                config,
                name=name,
                incarnation=incarnation,
                run=run,
                transport=transport,
                store=store,
                blobs=MemoryBlobStore(),
                log=logger("test"),
            )
            actor = kernel.build()
            serving[name] = tasks.create_task(serve(kernel), name=name)
            await kernel.ready.wait()
            return kernel, actor

        async def kill(name):
            serving[name].cancel()
            await asyncio.wait([serving[name]])

        yield tasks, start, kill, store
        for task in serving.values():
            task.cancel()


def trajectory_of(ticket, reward):
    segment = Segment(
        array("i", range(600)).tobytes(), b"\1" * 600, array("f", [-0.1] * 600).tobytes(), (VersionSpan(ticket.version, 0, 600),)
    )
    return Trajectory(ticket, (segment,), reward, 7, False, 0.2)


async def roll_out(actor, incarnation):
    """Admit and put until the job is closed; a reply that was lost is asked for again."""
    buffer = actor.ref("sample_buffer")
    closed = False
    while not closed:
        try:
            reply = await buffer.ask(Admit(GROUP_SIZE, actor.name, incarnation, 5.0), timeout=10.0)
        except AskFailed:
            continue
        closed = reply.closed
        async with asyncio.TaskGroup() as tasks:
            for n, ticket in enumerate(reply.tickets):
                tasks.create_task(buffer.ask(Put(trajectory_of(ticket, float(n))), timeout=10.0))


async def test_a_job_runs_through_the_bus_and_survives_the_buffers_death(tmp_path):
    async with job(tmp_path) as (tasks, start, kill, store):
        config = SampleBuffer.Config(
            train=TrainSection(batch_groups=BATCH_GROUPS, group_size=GROUP_SIZE), samples=SamplesSection(ticket_ttl_s=0.5)
        )
        await start(SampleBuffer, "sample_buffer-1", config)
        kernel, manager = await start(Manager, "env_manager-1", ActorConfig())
        _, trainer = await start(Actor, "trainer-1", ActorConfig())
        rolling = tasks.create_task(roll_out(manager, kernel.incarnation))
        buffer = trainer.ref("sample_buffer")
        term = (await buffer.ask(DrawTerm(0, 0), timeout=5.0)).term

        trained = []
        for step in range(1, STEPS + 1):
            batch = await buffer.ask(Claim(step, term, BATCH_GROUPS, 5.0), timeout=10.0)
            assert isinstance(batch, Batch)
            samples = [msgspec.msgpack.decode(s, type=Trajectory) for group in batch.groups for s in group]
            trained += [sample.ticket.trajectory_id for sample in samples]
            if step == 3:
                await kill("sample_buffer-1")
                await start(SampleBuffer, "sample_buffer-1", config)
            await buffer.ask(Advance(step, term), timeout=5.0)
            await buffer.ask(Commit(step, term), timeout=5.0)
        await buffer.ask(Close(), timeout=5.0)
        await rolling

        training = (await read_records(store))[0]
        assert len(set(trained)) == len(trained) == STEPS * BATCH_GROUPS * GROUP_SIZE
        assert (training.ended, training.committed) == (len(trained), STEPS)
        assert manager.heard == sorted(manager.heard)
        assert manager.heard[-1] == STEPS
