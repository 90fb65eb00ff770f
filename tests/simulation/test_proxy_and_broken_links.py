"""Engines whose link breaks for a moment, or that are away while others are suspended or resumed."""

import asyncio

from rubato.actors.config import CheckSection
from rubato.actors.engines.section import EngineSection, ScriptedSection
from rubato.actors.engines.worker import EngineWorker
from rubato.actors.messages.generation import Completion, EngineStatus, Generate, Inspect, Resume, Sampling, Suspend
from rubato.actors.proxy.proxy import LLMProxy
from rubato.actors.training.checks import sample_random_prompts
from rubato.runtime.actor import handler
from tests.simulation.test_proxy_on_the_bus import Asker, cluster
from tests.virtual import virtual


def section(token_s=0.1):
    scripted = ScriptedSection(token_s=token_s, stop_share=0.0)
    return EngineSection(kind="scripted", num_slots=8, stream_every=2, scripted=scripted)


@virtual
async def test_a_link_that_breaks_for_a_moment_aborts_no_request(tmp_path):
    async with cluster(tmp_path) as made:
        await made.start(LLMProxy, "llm_proxy-1")
        await made.start(EngineWorker, "engine-1", engine=section())
        proxy = (await made.start(Asker, "env_manager-1")).ref("llm_proxy")
        asks = [made.tasks.create_task(proxy.ask(Generate(f"t{i}", f"t{i}", b"\0" * 40, Sampling(200)), timeout=300)) for i in range(3)]
        await asyncio.sleep(3.0)
        made.network.snap("llm_proxy-1", "engine-1", "cable pulled")
        replies = [await ask for ask in asks]
        assert all(isinstance(r, Completion) for r in replies), [(type(r).__name__, getattr(r, "reason", "")) for r in replies]


@virtual
async def test_an_engine_that_was_away_when_all_were_resumed_goes_on_too(tmp_path):
    async with cluster(tmp_path) as made:
        await made.start(LLMProxy, "llm_proxy-1")
        await made.start(EngineWorker, "engine-1", engine=section())
        proxy = (await made.start(Asker, "env_manager-1")).ref("llm_proxy")
        await made.until(lambda: made.actors["llm_proxy-1"].placement.seats)
        await proxy.ask(Suspend(), timeout=10)
        made.network.snap("llm_proxy-1", "engine-1", "cable pulled")
        await asyncio.sleep(0.5)
        assert not made.actors["llm_proxy-1"].placement.seats
        await proxy.ask(Resume(), timeout=10)
        reply = await proxy.ask(Generate("t", "t", b"\0" * 40, Sampling(5)), timeout=120)
        assert isinstance(reply, Completion)


@virtual
async def test_an_engine_that_joins_while_all_are_resumed_goes_on_too(tmp_path):
    """Resume comes between the Suspend that the proxy gave a newcomer and the Inspect that shows it to be suspended."""

    class SlowToInspect(EngineWorker):
        @handler
        async def inspect(self, request: Inspect) -> EngineStatus:
            await asyncio.sleep(1.0)
            return await super().inspect(request)

    async with cluster(tmp_path) as made:
        await made.start(LLMProxy, "llm_proxy-1")
        proxy = (await made.start(Asker, "env_manager-1")).ref("llm_proxy")
        await proxy.ask(Suspend(), timeout=10)
        await made.start(SlowToInspect, "engine-1", engine=section())
        await asyncio.sleep(0.5)
        await proxy.ask(Resume(), timeout=10)
        reply = await proxy.ask(Generate("t", "t", b"\0" * 40, Sampling(5)), timeout=120)
        assert isinstance(reply, Completion)


@virtual
async def test_the_start_up_check_survives_a_link_that_breaks_for_a_moment(tmp_path):
    async with cluster(tmp_path) as made:
        await made.start(LLMProxy, "llm_proxy-1")
        await made.start(EngineWorker, "engine-1", engine=section())
        proxy = (await made.start(Asker, "env_manager-1")).ref("llm_proxy")
        checking = made.tasks.create_task(
            sample_random_prompts(proxy, CheckSection(num_tokens=100), vocab_size=100, version=0, key="1", seed=1)
        )
        await asyncio.sleep(3.0)
        made.network.snap("llm_proxy-1", "engine-1", "cable pulled")
        assert await checking


@virtual
async def test_an_engine_does_not_answer_with_the_abort_of_a_former_stay(tmp_path):
    """Link to A breaks, the request moves to B; A is back and told to drop it; B dies, and the request comes to A again."""
    async with cluster(tmp_path) as made:
        await made.start(LLMProxy, "llm_proxy-1")
        await made.start(EngineWorker, "engine-1", engine=section())
        proxy = (await made.start(Asker, "env_manager-1")).ref("llm_proxy")
        await made.until(lambda: made.actors["llm_proxy-1"].placement.seats)
        asking = made.tasks.create_task(proxy.ask(Generate("t", "t", b"\0" * 40, Sampling(200)), timeout=300))
        await asyncio.sleep(1.0)
        await made.start(EngineWorker, "engine-2", engine=section())
        await asyncio.sleep(1.0)
        made.network.snap("llm_proxy-1", "engine-1", "cable pulled")
        await asyncio.sleep(10.0)  # engine-1 is back, the request lives on engine-2
        shared = made.actors["llm_proxy-1"].requests.running["t"]
        assert shared.engine == "engine-2"
        assert "engine-1" in made.actors["llm_proxy-1"].placement.seats
        have = shared.num_tokens
        await made.kill("engine-2")
        reply = await asking
        assert isinstance(reply, Completion), (reply.reason, f"{have} tokens were known, {len(reply.tokens.ids) // 4} came")
