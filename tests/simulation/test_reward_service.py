"""The reward service on a real kernel: many askers, few calls."""

import asyncio
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec

from rubato.actors.messages.samples import NotScored, Score, Scores
from rubato.actors.rewards.service import RewardService
from rubato.bus.link import Identity
from rubato.bus.memory import MemoryNetwork, MemoryTransport
from rubato.bus.message import Ack
from rubato.runtime.actor import Actor, RunInfo, handler
from rubato.runtime.config import ActorConfig
from rubato.runtime.kernel import NODE, Kernel
from rubato.runtime.memory import MemoryStore
from rubato.runtime.messages import Finish, Notice
from rubato.runtime.observe.log import logger

USER = Path(__file__).parents[1] / "unit" / "actors" / "rewards" / "user_rewards.py"


class Node(Actor):
    role = "node"

    def __init__(self, config, kernel):
        super().__init__(config, kernel)
        self.notices = []
        self.over = asyncio.get_running_loop().create_future()

    @handler
    async def finished(self, message: Finish) -> Ack:
        self.over.set_result(message)
        return Ack()

    @handler
    async def noticed(self, message: Notice) -> None:
        self.notices.append(message.text)


@asynccontextmanager
async def service(tmp_path, *functions, hidden=str):
    network, store = MemoryNetwork(), MemoryStore()
    async with asyncio.TaskGroup() as tasks:
        serving, actors = [], {}
        config = RewardService.Config.model_validate({"reward": {"functions": functions}})
        for name, actor_class, settings in ((NODE, Node, ActorConfig()), ("reward_service-1", RewardService, config)):
            incarnation = await store.increment("incarnation")
            kernel = Kernel(
                actor_class,
                settings,
                name=name,
                incarnation=incarnation,
                run=RunInfo("test", tmp_path, 7, 1, 0.0, hidden),
                transport=MemoryTransport(Identity("test", name, incarnation), network),
                store=store,
                blobs=None,
                log=logger("rubato.test"),
            )
            actors[name] = kernel.build()
            serving.append(tasks.create_task(kernel.serve(), name=name))
            await kernel.ready.wait()
        yield actors[NODE], actors["reward_service-1"]
        for task in serving:
            task.cancel()


def request(index, text):
    return Score(f"t{index}.1", (text,), msgspec.msgpack.encode({"turns": 1, "invalid_turns": 0}))


async def test_concurrent_requests_share_calls_and_each_gets_its_own_score(tmp_path):
    async with service(tmp_path, f"{USER}:lengths") as (node, rewards):
        ref = node.ref("reward_service")

        replies = await asyncio.gather(*(ref.ask(request(i, "x" * i), timeout=20) for i in range(200)))

        assert replies == [Scores((float(i),)) for i in range(200)]
        assert rewards.metrics.snapshot()["reward/batch_max"] > 1


async def test_a_failing_function_is_told_to_the_user_once(tmp_path):
    async with service(tmp_path, f"{USER}:picky") as (node, rewards):
        ref = node.ref("reward_service")

        replies = [await ref.ask(request(i, "bad"), timeout=20) for i in range(3)]
        await ref.ask(request(9, "good"), timeout=20)

        assert [type(reply) for reply in replies] == [NotScored] * 3
        assert len(node.notices) == 1
        metrics = rewards.metrics.snapshot()
        assert (metrics["reward/failed"], metrics["reward/failed/raised"]) == (3, 3)
        assert "picky raised KeyError('bad')" in node.notices[0]


async def test_the_value_of_a_variable_in_what_a_function_raises_leaves_no_service(tmp_path):
    async with service(tmp_path, f"{USER}:picky", hidden=lambda text: text.replace("bad", "${KEY}")) as (node, _):
        reply = await node.ref("reward_service").ask(request(0, "bad"), timeout=20)
        await node.ref("reward_service").ask(request(9, "good"), timeout=20)

        assert len(node.notices) == 1
        assert all("KeyError('${KEY}')" in text for text in (reply.detail, node.notices[0]))


async def test_a_function_that_is_not_there_ends_the_job(tmp_path):
    async with service(tmp_path, f"{USER}:missing") as (node, _):
        finish = await node.over

        assert finish.failed
        assert f"{USER}:missing does not exist" in finish.reason
