"""A pool of workers that is closed while a call is in flight, with real processes."""

import asyncio
from pathlib import Path

import msgspec

from rubato.actors.config import RewardSection
from rubato.actors.messages.samples import Score
from rubato.actors.rewards.scorer import Scorer
from rubato.actors.rewards.service import RewardService
from rubato.bus.link import Identity
from rubato.bus.memory import MemoryTransport
from rubato.runtime.kernel import Kernel
from rubato.runtime.memory import MemoryBlobStore
from rubato.runtime.observe.log import logger
from rubato.runtime.pool.pool import WorkerPool
from tests.simulation.test_kernel import Client, cluster

USER = Path(__file__).parents[1] / "unit" / "actors" / "rewards" / "user_rewards.py"


def num_alive(scorer):
    return sum(worker is not None and worker.alive for worker in scorer._local._pool._workers)


async def test_no_worker_is_started_behind_the_end_of_the_pool():
    """A call that was in flight when the pool was closed is tried again: that starts a worker which nobody ends."""
    scorer = Scorer(RewardSection(functions=[f"{USER}:hang"], workers=1, timeout_s=60.0))
    assert await scorer.start() == ""
    score = Score("t", ("x",), msgspec.msgpack.encode({"turns": 1}))
    async with asyncio.TaskGroup() as tasks:
        scoring = tasks.create_task(scorer.score([score]))
        await asyncio.sleep(0.5)
        await scorer.close()
        await asyncio.wait([scoring], timeout=5.0)
        left = num_alive(scorer)
        scoring.cancel()
    await scorer.close()
    assert left == 0


async def test_a_reward_service_that_stopped_leaves_no_worker(tmp_path):
    """The same through the kernel: in a program that embeds the job the worker stays for as long as the program."""
    async with cluster(tmp_path) as made:
        config = {"reward": {"functions": [f"{USER}:hang"], "workers": 1, "timeout_s": 60.0}}
        kernel = Kernel(
            RewardService,
            RewardService.Config.model_validate(config),
            name="reward_service-1",
            incarnation=await made.store.increment("incarnation"),
            run=made.run,
            transport=MemoryTransport(Identity("test", "reward_service-1", 1), made.network),
            store=made.store,
            blobs=MemoryBlobStore(),
            log=logger("rubato.test"),
        )
        service = kernel.build()
        serving = made.tasks.create_task(kernel.serve())
        await kernel.ready.wait()
        client, _ = await made.start(Client, "client-1")
        score = Score("t", ("x",), msgspec.msgpack.encode({"turns": 1}))
        asking = client.ref("reward_service").ask(score, timeout=30, retry=False)
        ask = made.tasks.create_task(_quiet(asking))
        await asyncio.sleep(0.5)
        kernel.stop()
        await serving
        left = num_alive(service._scorer)
        await service._scorer.close()
        await ask
        assert left == 0


async def _quiet(ask):
    await asyncio.gather(ask, return_exceptions=True)


async def test_a_pool_whose_closing_was_cancelled_is_closed_by_whoever_closes_it_next():
    pool = WorkerPool(workers=1)
    await pool.start()
    (worker,) = pool._workers
    async with asyncio.TaskGroup() as tasks:
        closing = tasks.create_task(pool.close())
        await asyncio.sleep(0)
        closing.cancel()

    await pool.close()

    assert worker is not None
    assert worker.over
