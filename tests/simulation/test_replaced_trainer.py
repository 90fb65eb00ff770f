"""A trainer that was replaced while it was stopped, and wakes in the middle of a checkpoint."""

import asyncio

import msgspec

from rubato.actors.checkpoints import checkpoint as checkpoints
from rubato.actors.config import CheckSection, EvalSection
from rubato.actors.messages.samples import Batch, Claim, Close, NotReady
from rubato.actors.training.trainer import CheckpointSection
from rubato.bus.memory import MemoryNetwork
from rubato.bus.message import Ack
from rubato.runtime.actor import Actor, RunInfo, handler
from rubato.runtime.config import ActorConfig
from rubato.runtime.memory import MemoryStore
from rubato.runtime.messages import Finish
from rubato.runtime.registry import list_actors
from rubato.sim.simtest.toys import ToyTrainEngine
from rubato.sim.virtual import run_virtual
from tests.simulation.test_trainer import Buffer, ToyTrainer, kernel_of


class Node(Actor):
    role = "node"

    def __init__(self, config, kernel):
        super().__init__(config, kernel)
        self.over = []

    @handler
    async def finished(self, message: Finish) -> Ack:
        self.over.append(message)
        return Ack()


class Ends(Buffer):
    @handler
    async def close(self, request: Close) -> Ack:
        return Ack()


class Late(Ends):
    def __init__(self, config, kernel):
        super().__init__(config, kernel)
        self.awake = asyncio.Event()

    @handler
    async def claim(self, request: Claim) -> Batch | NotReady:
        await self.awake.wait()
        return await super().claim(request)


CONFIG = {"check": CheckSection(enabled=False), "eval": EvalSection(every=0, final_num_tasks=0)}


def test_a_replaced_trainer_that_wakes_in_the_middle_of_a_checkpoint_does_not_end_the_job(tmp_path):
    """Its successor removed what it was writing, which is no full disk."""

    class Stopped(ToyTrainEngine):
        def write_toy(self, *args):
            write, (*_, folder) = checkpoints.write_through, args

            def stopped_in_it(path, content):
                digest = write(path, content)
                checkpoints.drop_unnamed(folder.parent, term=9)  # the successor's Trainer._take_over, meanwhile
                return digest

            checkpoints.write_through = stopped_in_it
            try:
                super().write_toy(*args)
            finally:
                checkpoints.write_through = write

    class StoppedTrainer(ToyTrainer):
        def _build(self):
            return Stopped(lambda *_: None, lambda *_: None)

    async def main():
        network, store, run = MemoryNetwork(), MemoryStore(), RunInfo("test", tmp_path, 7, 2)
        config = ToyTrainer.Config(checkpoint=CheckpointSection(every=1), **CONFIG)
        async with asyncio.TaskGroup() as tasks:
            serving = {}
            for cls, settings in ((Node, ActorConfig()), (Late, ActorConfig()), (StoppedTrainer, config)):
                kernel = kernel_of(cls, settings, network, store, run)
                serving[cls] = kernel.build(), tasks.create_task(_of(kernel))
                await kernel.ready.wait()
            await asyncio.sleep(0.5)
            (mine,) = [r for r in await list_actors(store) if r.name == "trainer-1"]
            record = msgspec.msgpack.encode(msgspec.structs.replace(mine, incarnation=2, address="memory://successor"))
            assert await store.lease("actor/trainer-1", 2, record, 10.0)  # the successor has the name before it wakes
            serving[Late][0].awake.set()
            await asyncio.sleep(5.0)
            for _, task in serving.values():
                task.cancel()
            return [f.reason for f in serving[Node][0].over if f.failed]

    assert run_virtual(main) == []


async def _of(kernel):
    (ended,) = await asyncio.gather(kernel.serve(), return_exceptions=True)
    return repr(ended)
