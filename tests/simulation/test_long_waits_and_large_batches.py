"""Waits longer than a turn may take, and batches larger than a frame."""

import asyncio

from rubato.actors.envs.manager import EnvManager
from rubato.actors.proxy.proxy import LLMProxy
from rubato.runtime.kernel import NODE
from tests.simulation.test_env_manager import Buffer, Cluster, Node, write_model
from tests.virtual import virtual


@virtual
async def test_engines_that_take_longer_than_a_turn_may_take_do_not_end_the_job(tmp_path):
    """The proxy has no engine yet: it loads a large model, or was started anew. That says nothing about the rollouts."""
    Buffer.left = 64
    write_model(tmp_path / "model")
    settings = {"model": {"path": "model"}, "env": {"concurrency": 64}, "rollout": {"max_new_tokens": 8, "max_turns": 6}}
    async with asyncio.TaskGroup() as tasks:
        made = Cluster(tasks, tmp_path)
        await made.start(Node, NODE)
        await made.start(Buffer, "sample_buffer-1")
        await made.start(LLMProxy, "llm_proxy-1", LLMProxy.Config())
        await made.start(EnvManager, "env_manager-1", EnvManager.Config.model_validate(settings))
        await asyncio.sleep(330.0)  # rollout.generate_timeout_s is 300 by default
        finishes, given = list(Node.finishes), list(Buffer.given_up)
        for task in made.serving.values():
            task.cancel()
    assert not finishes, finishes[0].reason
    assert all(g.retry for g in given), (len(given), given[0].reason, given[0].detail)


@virtual
async def test_a_batch_of_a_few_million_tokens_reaches_the_trainer(tmp_path):
    """No interleaving: 512 trajectories of 8,192 tokens, at 9 bytes each, are more than a body may have."""
    from rubato.actors.messages.samples import Batch, Claim, NotReady
    from rubato.runtime.actor import Actor, handler
    from tests.simulation.test_kernel import Client, cluster

    class Hands(Actor):
        role = "sample_buffer"

        @handler
        async def claim(self, request: Claim) -> Batch | NotReady:
            return Batch.of(1, tuple(tuple(bytes(9 * 8192) for _ in range(8)) for _ in range(64)), b"")

    async with cluster(tmp_path) as made:
        await made.start(Hands, "sample_buffer-1")
        client, _ = await made.start(Client, "trainer-1")
        assert isinstance(await client.ref("sample_buffer").ask(Claim(1, 1, 64), timeout=30), Batch)
