"""Prompts prefilled on some engines and decoded on others, in virtual time: token for token what one engine gives, whoever dies."""

import asyncio

import pytest

from rubato.actors import plugins
from rubato.actors.config import ProxySection
from rubato.actors.engines.section import EngineSection, ScriptedSection
from rubato.actors.engines.worker import EngineWorker
from rubato.actors.messages.generation import Abort, Aborted, Generate, Sampling, VersionSpan
from rubato.actors.messages.moves import CachePart, FetchCache, NotMoved, PrepareMove
from rubato.actors.moves.departures import EngineMoves
from rubato.actors.proxy.proxy import LLMProxy
from rubato.runtime.actor import handler
from tests.simulation.test_proxy_on_the_bus import Asker, _ids, cluster
from tests.virtual import virtual

NUM, TOKENS = 10, 40


def section(serves, *, prefill_s=0.02, token_s=0.002, num_slots=4):
    scripted = ScriptedSection(prefill_s=prefill_s, token_s=token_s, stop_share=0.0)
    return EngineSection(kind="scripted", serves=serves, num_slots=num_slots, stream_every=8, scripted=scripted)


def requests(num=NUM):
    greedy = Sampling(TOKENS, temperature=0.0)
    return [Generate(f"t{i}", f"t{i}", i.to_bytes(4, "little") * 5, greedy) for i in range(num)]


def sampled(actor):
    return actor.metrics.snapshot().get("engine/tokens", 0)


async def play(folder, engines, during=None, num=NUM, proxy=None, **times):
    """The completions' ids, and the cluster's actors."""
    async with cluster(folder) as made:
        await made.start(LLMProxy, "llm_proxy-1", **({"proxy": proxy} if proxy else {}))
        for i, serves in enumerate(engines, 1):
            await made.start(EngineWorker, f"engine-{i}", engine=section(serves, **times))
        asker = (await made.start(Asker, "env_manager-1")).ref("llm_proxy")
        asking = [made.tasks.create_task(asker.ask(request, timeout=60)) for request in requests(num)]
        if during:
            await during(made)
        completions = [await task for task in asking]
        assert all(c.tokens.spans == (VersionSpan(0, 0, TOKENS),) for c in completions)
        return [_ids(c) for c in completions], made.actors


@virtual
async def test_each_stage_is_where_it_belongs_and_no_token_differs(tmp_path):
    alone, _ = await play(tmp_path, ["both"])

    apart, actors = await play(tmp_path, ["prefill", "decode", "decode"])

    assert apart == alone
    reading, *sampling = [sampled(actors[f"engine-{i}"]) for i in (1, 2, 3)]
    assert NUM <= reading <= 2 * NUM  # the first token, and at most one that a step in progress gave
    assert reading + sum(sampling) == NUM * TOKENS
    assert all(sampling)
    assert actors["llm_proxy-1"].metrics.snapshot().get("proxy/moved", 0) == 0


@virtual
async def test_a_fetched_cache_saves_the_prefill(tmp_path):
    async with cluster(tmp_path) as made:
        await made.start(LLMProxy, "llm_proxy-1")
        await made.start(EngineWorker, "engine-1", engine=section("prefill", prefill_s=1.0))
        await made.start(EngineWorker, "engine-2", engine=section("decode", prefill_s=100.0))
        asker = await made.start(Asker, "env_manager-1")

        await asker.ref("llm_proxy").ask(requests(1)[0], timeout=20)  # in less than the second prefill takes

        assert not (await asker.ref("engine-1").ask(FetchCache("t0"), timeout=5)).shape  # who fetched it has it


@virtual
@pytest.mark.parametrize("victim", ["engine-1", "engine-3"])
async def test_the_death_of_an_engine_of_either_stage_changes_no_token(tmp_path, victim):
    async def kill(made):
        await made.until(lambda: sampled(made.actors["engine-3"]) > 20)
        await made.kill(victim)

    alone, _ = await play(tmp_path, ["both"])

    apart, actors = await play(tmp_path, ["prefill", "prefill", "decode", "decode"], kill)

    assert apart == alone
    assert victim == "engine-1" or actors["llm_proxy-1"].metrics.snapshot().get("proxy/moved", 0) > 0


@virtual
async def test_where_no_engine_is_left_to_decode_those_that_prefill_do(tmp_path):
    async def kill(made):
        await made.until(lambda: sampled(made.actors["engine-2"]) > 20)
        await made.kill("engine-2")

    alone, _ = await play(tmp_path, ["both"])

    apart, _ = await play(tmp_path, ["prefill", "decode"], kill)

    assert apart == alone


@virtual
async def test_the_planner_gives_an_engine_to_the_stage_that_holds_up_the_other_and_no_request_is_lost(tmp_path):
    auto = ProxySection(balance="auto", balance_s=1.0)
    alone, _ = await play(tmp_path, ["both"], num=200)

    engines = ["prefill", "decode", "decode", "decode"]
    apart, actors = await play(tmp_path, engines, num=200, proxy=auto, prefill_s=0.5, num_slots=1)

    assert apart == alone
    assert sum(sampled(actors[f"engine-{i}"]) <= 0 for i in (1, 2, 3, 4)) == 0
    assert actors["llm_proxy-1"].metrics.snapshot()["proxy/prefill_engines"] > 1


class HoardingMoves(EngineMoves):
    @handler(concurrency=256)
    async def fetch_cache(self, request: FetchCache) -> CachePart:
        HoardingWorker.asked.set()
        await HoardingWorker.go_on.wait()
        return await super().fetch_cache(request)


class HoardingWorker(EngineWorker):
    """Gives no cache away until the test goes on."""

    asked: asyncio.Event
    go_on: asyncio.Event

    def make(self, path):
        return HoardingMoves(self) if path == plugins.ENGINE_MOVES else super().make(path)


@pytest.mark.parametrize("drains", [False, True])
@virtual
async def test_one_that_is_aborted_or_handed_back_while_its_cache_comes_is_not_decoded(tmp_path, drains):
    HoardingWorker.asked, HoardingWorker.go_on = asyncio.Event(), asyncio.Event()
    async with cluster(tmp_path) as made:
        await made.start(LLMProxy, "llm_proxy-1")
        await made.start(HoardingWorker, "engine-1", engine=section("prefill"))
        await made.start(EngineWorker, "engine-2", engine=section("decode"))
        engine = made.actors["engine-2"]
        proxy = (await made.start(Asker, "env_manager-1")).ref("llm_proxy")
        await made.until(lambda: len(made.actors["llm_proxy-1"].placement.seats) == 2)
        asked = made.tasks.create_task(proxy.ask(requests(1)[0], timeout=60))
        await HoardingWorker.asked.wait()
        if drains:
            ending = made.tasks.create_task(made.drain("engine-2"))
        else:
            ending = made.tasks.create_task(proxy.ask(Abort("t0", "enough"), timeout=60))
        await asyncio.sleep(0.01)
        HoardingWorker.go_on.set()
        answer = await asked
        await ending

        assert sampled(engine) == 0
        if drains:
            assert len(_ids(answer)) == TOKENS
        else:
            assert isinstance(answer, Aborted)
            assert answer.reason == "enough"


class LeavingMoves(EngineMoves):
    async def _keep_cache(self, request_id):
        worker = self.worker
        if worker.told is None and worker.before:
            worker.told = await self.prepare_move(PrepareMove(request_id, 1, "engine-2", 0))
        await super()._keep_cache(request_id)
        if worker.told is None:
            worker.told = await self.prepare_move(PrepareMove(request_id, 1, "engine-2", 0))


class LeavingWorker(EngineWorker):
    """Its first request is told to move just before or after it is taken out to be handed over."""

    before = True
    told: object = None

    def make(self, path):
        return LeavingMoves(self) if path == plugins.ENGINE_MOVES else super().make(path)


@pytest.mark.parametrize("before", [True, False])
@virtual
async def test_one_that_is_to_move_while_it_is_handed_over_is_decoded_as_ever(tmp_path, monkeypatch, before):
    monkeypatch.setattr(LeavingWorker, "before", before)
    alone, _ = await play(tmp_path, ["both"], num=1)
    async with cluster(tmp_path) as made:
        await made.start(LLMProxy, "llm_proxy-1")
        await made.start(LeavingWorker, "engine-1", engine=section("prefill"))
        await made.start(EngineWorker, "engine-2", engine=section("decode"))
        asker = await made.start(Asker, "env_manager-1")
        await made.until(lambda: len(made.actors["llm_proxy-1"].placement.seats) == 2)

        completion = await asker.ref("llm_proxy").ask(requests(1)[0], timeout=60, retry=False)

        assert isinstance(made.actors["engine-1"].told, NotMoved) != before
        assert completion.engine == "engine-2"
        assert [_ids(completion)] == alone


@virtual
async def test_an_engine_of_a_stage_that_can_not_take_up_a_cache_does_not_start(tmp_path, monkeypatch):
    monkeypatch.setattr("rubato.actors.scripted.engine.ScriptedEngine.capabilities", frozenset())

    with pytest.raises(ExceptionGroup) as told:
        async with cluster(tmp_path) as made:
            await made.start(EngineWorker, "engine-1", engine=section("decode"))

    assert "ScriptedEngine has not the capability cache" in repr(told.value.exceptions)
