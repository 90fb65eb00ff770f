"""Credit, parked letters and queues where something ends or is woken at an awkward moment."""

import asyncio

from rubato.actors.messages.samples import Score, Scores
from rubato.actors.rewards.service import BATCH, RewardService
from rubato.bus.link import Identity
from rubato.bus.memory import MemoryTransport
from rubato.bus.message import Ack, Request
from rubato.runtime.actor import Actor, handler
from rubato.runtime.kernel import Kernel
from rubato.runtime.memory import MemoryBlobStore
from rubato.runtime.observe.log import logger
from tests.simulation.test_kernel import Client, cluster
from tests.virtual import virtual


class Big(Request[Ack], frozen=True):
    body: bytes


class Work(Request[Ack], frozen=True):
    n: int


class Sink(Actor):
    role = "server"

    @handler(concurrency=4096)
    async def big(self, request: Big) -> Ack:
        return Ack()


class Narrow(Actor):
    role = "server"

    def __init__(self, config, kernel):
        super().__init__(config, kernel)
        self.began = []
        self.busy = asyncio.Event()

    @handler(concurrency=2)
    async def work(self, request: Work) -> Ack:
        self.began.append(request.n)
        if len(self.began) == 2:
            self.busy.set()
        await asyncio.get_running_loop().create_future()
        return Ack()


@virtual
async def test_who_waits_for_credit_gets_it_once_it_is_there(tmp_path):
    """Large messages used the bytes up; one grant brings them back, and there are more waiters than it has messages."""
    async with cluster(tmp_path) as made:
        await made.start(Sink, "server-1")
        client, _ = await made.start(Client, "client-1")
        ref = client.ref("server")
        await ref.ask(Big(b""), timeout=5)
        asks = [ref.ask(Big(bytes(100_000)), timeout=60) for _ in range(42)]
        asks += [ref.ask(Big(bytes(100)), timeout=60) for _ in range(300)]

        replies = await asyncio.gather(*asks, return_exceptions=True)

        failed = [r for r in replies if not isinstance(r, Ack)]
        assert not failed


@virtual
async def test_what_is_parked_when_an_actor_stops_is_not_begun(tmp_path):
    async with cluster(tmp_path) as made:
        kernel, server = await made.start(Narrow, "server-1")
        client, _ = await made.start(Client, "client-1")
        asks = [made.tasks.create_task(_quiet(client.ref("server").ask(Work(n), timeout=900))) for n in range(5)]
        await server.busy.wait()
        loop = asyncio.get_running_loop()
        began = loop.time()
        kernel.stop()
        await asyncio.wait([made.serving["server-1"]], timeout=300)
        took = loop.time() - began
        for ask in asks:
            ask.cancel()
        assert took < 20
        assert server.began == [0, 1]


async def _quiet(ask):
    (result,) = await asyncio.gather(ask, return_exceptions=True)
    return result


@virtual
async def test_an_actor_that_fails_with_parked_letters_raises_nothing_in_the_loop(tmp_path):
    async with cluster(tmp_path) as made:
        _, server = await made.start(Narrow, "server-1")
        client, _ = await made.start(Client, "client-1")
        asks = [made.tasks.create_task(_quiet(client.ref("server").ask(Work(n), timeout=900))) for n in range(5)]
        await server.busy.wait()
        await made.kill("server-1")
        for ask in asks:
            ask.cancel()


@virtual
async def test_scores_behind_a_crowd_that_went_away_are_not_forgotten(tmp_path):
    """A whole batch of waiting requests was cancelled while the worker was busy; those behind them wait for ever."""

    class Slow:
        def __init__(self):
            self.called, self.go = asyncio.Event(), asyncio.Event()

        async def start(self):
            return ""

        async def close(self):
            pass

        async def score(self, requests):
            self.called.set()
            await self.go.wait()
            return [Scores((1.0,)) for _ in requests]

    async with cluster(tmp_path) as made:
        network, store, run = made.network, made.store, made.run
        incarnation = await store.increment("incarnation")
        kernel = Kernel(
            RewardService,
            RewardService.Config.model_validate({"reward": {"functions": ["x:y"], "workers": 1}}),
            name="reward_service-1",
            incarnation=incarnation,
            run=run,
            transport=MemoryTransport(Identity("test", "reward_service-1", incarnation), network),
            store=store,
            blobs=MemoryBlobStore(),
            log=logger("rubato.test"),
        )
        service = kernel.build()
        slow = service._scorer = Slow()
        made.serving["reward_service-1"] = made.tasks.create_task(kernel.serve())
        await kernel.ready.wait()
        one, _ = await made.start(Client, "client-1")
        other, _ = await made.start(Client, "client-2")

        def ask(client, i):
            score = client.ref("reward_service").ask(Score(f"t{i}", ("x",), b"\x80"), timeout=120)
            return made.tasks.create_task(_quiet(score))

        busy = ask(other, 0)
        await slow.called.wait()
        crowd = [ask(one, 100 + i) for i in range(BATCH)]
        await asyncio.sleep(0.1)
        behind = [ask(other, 1 + i) for i in range(3)]
        await asyncio.sleep(0.1)
        await made.kill("client-1")
        for c in crowd:
            c.cancel()
        await asyncio.sleep(0.1)
        slow.go.set()
        assert await busy == Scores((1.0,))
        assert [await b for b in behind] == [Scores((1.0,))] * 3
