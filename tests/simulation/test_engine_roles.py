"""Engines under several roles, in virtual time: they are found by what they provide."""

from rubato.actors.engines.worker import EngineWorker
from rubato.actors.messages.generation import VersionSpan
from rubato.actors.proxy.proxy import LLMProxy
from tests.simulation.test_prefill_apart import NUM, TOKENS, requests, sampled, section
from tests.simulation.test_proxy_on_the_bus import Asker, _ids, cluster
from tests.virtual import virtual


async def play(folder, names, victim=""):
    """The completions' ids, and tokens sampled by each engine."""
    async with cluster(folder) as made:
        await made.start(LLMProxy, "llm_proxy-1")
        for name in names:
            await made.start(EngineWorker, name, engine=section("both"))
        asker = (await made.start(Asker, "env_manager-1")).ref("llm_proxy")
        asking = [made.tasks.create_task(asker.ask(request, timeout=60)) for request in requests()]
        if victim:
            await made.until(lambda: sampled(made.actors[victim]) > 0)
            await made.kill(victim)
        completions = [await task for task in asking]
        assert all(c.tokens.spans == (VersionSpan(0, 0, TOKENS),) for c in completions)
        return [_ids(c) for c in completions], {name: sampled(made.actors[name]) for name in names}


@virtual
async def test_requests_go_to_engines_of_every_role_and_no_token_differs(tmp_path):
    alone, _ = await play(tmp_path, ["engine-1"])

    both, by_engine = await play(tmp_path, ["engine-1", "far_engine-1"])

    assert both == alone
    assert sum(by_engine.values()) == NUM * TOKENS
    assert all(by_engine.values())


@virtual
async def test_the_engine_of_another_role_that_dies_hands_its_requests_to_the_others(tmp_path):
    alone, _ = await play(tmp_path, ["engine-1"])

    left, _ = await play(tmp_path, ["engine-1", "far_engine-1"], victim="far_engine-1")

    assert left == alone
