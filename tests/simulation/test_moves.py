"""Requests that move between real workers through the real proxy: token for token, and whoever is killed at whatever stage."""

import asyncio
from contextlib import asynccontextmanager
from typing import ClassVar

import msgspec
import pytest

from rubato.actors import plugins
from rubato.actors.config import ModelSection
from rubato.actors.engines.engine import ENGINES, Cache
from rubato.actors.engines.section import EngineSection, ScriptedSection
from rubato.actors.engines.worker import EngineWorker
from rubato.actors.messages.generation import Abort, Aborted, Completion, Generate, Sampling
from rubato.actors.messages.moves import Move, Moved, MovePrepared, NotMoved, PrepareMove, TakeMove
from rubato.actors.moves.departures import EngineMoves
from rubato.actors.proxy.proxy import LLMProxy
from rubato.actors.scripted.engine import ScriptedEngine
from rubato.bus.codec import MAX_BODY_BYTES
from rubato.bus.errors import AskFailed
from rubato.bus.message import Ack, pack_i32
from rubato.bus.zmq import ZmqTransport
from rubato.planning.engine_info import WeightsNeed
from rubato.planning.moves import FEW, Rate
from rubato.runtime.actor import handler
from rubato.sim.simtest.network import FaultPlan, FaultyNetwork
from tests.models import write_model
from tests.simulation.test_proxy_on_the_bus import Asker, Cluster
from tests.virtual import virtual

NUM = 60
REQUEST = Generate("r", "s", pack_i32(range(3, 12)), Sampling(NUM, seed=5))
LATER = msgspec.structs.replace(REQUEST, weights=WeightsNeed(1))
WORKER = EngineWorker.Config(
    engine=EngineSection(kind="scripted", num_slots=4, max_len=256, stream_every=1, scripted=ScriptedSection(token_s=0.01, stop_share=0.0))
)


class StagedMoves(EngineMoves):
    async def _pass(self, stage: str) -> None:
        if stage == StagedWorker.stage:
            StagedWorker.stage = ""
            StagedWorker.reached.set()
            await StagedWorker.go_on.wait()

    @handler(concurrency=64, outlives_asker=True)
    async def prepare_move(self, request: PrepareMove) -> MovePrepared | NotMoved:
        await self._pass("prepare")
        reply = await super().prepare_move(request)
        await self._pass("prepared")
        return reply

    @handler(concurrency=64)
    async def take_move(self, request: TakeMove) -> Ack | NotMoved:
        await self._pass("take")
        reply = await super().take_move(request)
        await self._pass("taken")
        return reply


class StagedWorker(EngineWorker):
    """Stops at one stage of a move, until the test goes on."""

    stage = ""
    reached: asyncio.Event
    go_on: asyncio.Event

    def make(self, path):
        return StagedMoves(self) if path == plugins.ENGINE_MOVES else super().make(path)


def moves_of(engine) -> EngineMoves:
    return engine.hook(plugins.ENGINE_MOVES)


def parked_by(engine):
    return moves_of(engine).leaving(engine.requests.running["r"]).parked


class Bench(Cluster):
    """Two engines, a proxy and somebody who asks."""

    async def begin(self, engines: int = 2) -> None:
        StagedWorker.reached, StagedWorker.go_on, StagedWorker.stage = asyncio.Event(), asyncio.Event(), ""
        self.engines = []
        for i in range(engines):
            await self.engine(f"engine-{i + 1}")
        await self.proxy()
        self.asker = await self.start(Asker, "env_manager-1")

    async def engine(self, name):
        await self.start(StagedWorker, name, **dict(WORKER))
        self.engines.append(self.actors[name])

    async def proxy(self):
        await self.start(LLMProxy, "llm_proxy-1")

    def ask(self, request):
        return self.tasks.create_task(self.asker.ref("llm_proxy").ask(request, timeout=200.0))

    async def sampled(self, num: int) -> None:
        while self.num_sampled < num:  # noqa: ASYNC110 - in virtual time
            await asyncio.sleep(0.002)

    @property
    def num_sampled(self) -> int:
        """By all engines that ever were."""
        return sum(engine._num_tokens for engine in self.engines)

    @property
    def source(self) -> str:
        return self.actors["llm_proxy-1"].requests.running["r"].engine

    def move(self, target: str = "", request_id: str = "r"):
        return self.ask(Move(request_id, target or ("engine-1" if self.source == "engine-2" else "engine-2")))


@asynccontextmanager
async def bench(folder, delay_s=0.0, **options):
    async with asyncio.TaskGroup() as tasks:
        cluster = Bench(tasks, folder)
        cluster.network = FaultyNetwork(FaultPlan(seed=1, delay_s=(delay_s, delay_s)))
        await cluster.begin(**options)
        yield cluster
        for name in ("env_manager-1", "llm_proxy-1", *[n for n in cluster.serving if n.startswith("engine-")]):
            if name in cluster.serving:
                await cluster.kill(name)


async def unmoved(cluster) -> Completion:
    """What the request comes to where nothing happens, under another id: the session draws."""
    return await cluster.ask(Generate("unmoved", "s", REQUEST.prompt, REQUEST.sampling))


@virtual
async def test_a_request_that_moves_is_answered_as_if_it_had_not_and_no_token_is_sampled_twice(tmp_path):
    async with bench(tmp_path) as cluster:
        expected = await unmoved(cluster)
        asked = cluster.ask(REQUEST)
        targets = []
        for num in (70, 80, 90):
            await cluster.sampled(num)
            moved = await cluster.move()
            targets.append(moved.engine)
            assert cluster.source == moved.engine
        completion = await asked

        assert targets in (["engine-1", "engine-2", "engine-1"], ["engine-2", "engine-1", "engine-2"])
        assert completion.tokens == expected.tokens
        assert completion.engine == targets[-1]
        assert cluster.num_sampled == 2 * NUM


@virtual
async def test_its_cache_comes_with_it_in_parts(tmp_path, monkeypatch):
    monkeypatch.setattr("rubato.actors.moves.caches.PART_BYTES", 16)
    caches = []
    async with bench(tmp_path, delay_s=0.001) as cluster:
        for engine in cluster.engines:
            inner = engine._engine.generate
            monkeypatch.setattr(engine._engine, "generate", lambda work, inner=inner: (caches.append(work.cache), inner(work))[1])
        asked = cluster.ask(REQUEST)
        await cluster.sampled(10)
        assert isinstance(await cluster.move(), Moved)
        await asked

        links = [list(moves_of(engine).caches.link._seen) for engine in cluster.engines]

    assert sorted(map(len, links)) == [0, 1]
    # There and back for the first part, and once more for the others, which are under way together.
    assert max(links) == [pytest.approx(len(caches[1].data) / 0.004, rel=0.2)]
    assert caches[0] is None
    assert caches[1].num_tokens >= 9 + 10 - 1
    assert len(caches[1].data) == 4 * caches[1].num_tokens > 16


class LargeCaches(ScriptedEngine):
    """Of 4 MiB a token."""

    took: ClassVar[list[int]] = []

    def generate(self, work):
        self.took += [len(work.cache.data)] if work.cache else []
        return super().generate(work)

    def _cache_of(self, sequence, num_tokens):
        cache = super()._cache_of(sequence, num_tokens)
        return cache._replace(shape=(1, 1, num_tokens, 1 << 20), data=memoryview(bytes(cache.data) * (1 << 20)))


@virtual
async def test_a_cache_that_the_target_can_not_use_is_computed_again(tmp_path, monkeypatch):
    """As between pools whose engines have other types."""
    async with bench(tmp_path) as cluster:
        expected = await unmoved(cluster)
        for engine in cluster.engines:

            async def fetched(*_):
                return Cache(0, (1, 1, 3, 1), "int32", memoryview(bytes(12)))

            monkeypatch.setattr(moves_of(engine).caches, "fetch", fetched)
        asked = cluster.ask(REQUEST)
        await cluster.sampled(NUM + 20)
        assert isinstance(await cluster.move(), Moved)
        completion = await asked

        assert completion.tokens == expected.tokens
        assert cluster.num_sampled == 2 * NUM


@pytest.mark.parametrize("victim", ["source", "target", "proxy"])
@pytest.mark.parametrize("stage", ["prepare", "prepared", "take", "taken"])
@virtual
async def test_whoever_is_killed_at_whatever_stage_nothing_is_lost_and_nothing_doubled(tmp_path, stage, victim):
    async with bench(tmp_path) as cluster:
        expected = await unmoved(cluster)
        asked = cluster.ask(REQUEST)
        await cluster.sampled(NUM + 20)
        source = cluster.source
        target = "engine-1" if source == "engine-2" else "engine-2"
        StagedWorker.stage = stage
        moving = cluster.tasks.create_task(swallow(cluster.asker.ref("llm_proxy").ask(Move("r", target), timeout=60.0, retry=False)))
        await StagedWorker.reached.wait()
        name = {"source": source, "target": target, "proxy": "llm_proxy-1"}[victim]

        await cluster.kill(name)
        StagedWorker.go_on.set()
        await (cluster.proxy() if victim == "proxy" else cluster.engine(name))
        completion = await asked
        await moving

        assert completion.tokens == expected.tokens
        # what a dead source had sampled and not told yet is sampled again, and nothing else
        assert 0 <= cluster.num_sampled - 2 * NUM <= (2 if victim == "source" else 0)


async def swallow(awaitable):
    try:
        await awaitable
    except AskFailed:
        return


@virtual
async def test_a_target_that_is_frozen_leaves_the_request_to_the_source(tmp_path):
    async with bench(tmp_path) as cluster:
        asked = cluster.ask(REQUEST)
        await cluster.sampled(20)
        source = cluster.source
        target = "engine-1" if source == "engine-2" else "engine-2"
        StagedWorker.stage = "take"
        moving = cluster.move(target)
        await StagedWorker.reached.wait()
        completion = await asked  # the source's: nobody came for it in time
        StagedWorker.go_on.set()

        assert completion.engine == source
        assert isinstance(await moving, NotMoved)
        assert cluster.num_sampled == NUM


@virtual
async def test_one_that_is_aborted_while_it_moves_ends_with_its_tokens(tmp_path):
    for stage in ("prepared", "take", "taken"):
        async with bench(tmp_path) as cluster:
            asked = cluster.ask(REQUEST)
            await cluster.sampled(20)
            StagedWorker.stage = stage
            moving = cluster.move()
            await StagedWorker.reached.wait()
            aborting = cluster.ask(Abort("r", "enough"))
            await asyncio.sleep(0.01)
            StagedWorker.go_on.set()
            result = await asked
            await aborting
            await moving

            assert isinstance(result, Aborted)
            assert result.reason == "enough"
            assert len(result.tokens.ids) // 4 == cluster.num_sampled < NUM
            assert all(not engine.requests.running for engine in cluster.engines)


@virtual
async def test_one_whose_asker_goes_away_while_it_moves_is_gone_everywhere(tmp_path):
    async with bench(tmp_path) as cluster:
        asked = cluster.ask(REQUEST)
        await cluster.sampled(20)
        StagedWorker.stage = "take"
        moving = cluster.move()
        await StagedWorker.reached.wait()
        source = next(engine for engine in cluster.engines if moves_of(engine).departures._parked)
        asked.cancel()
        await asyncio.sleep(0.01)
        parked = moves_of(source).departures._parked["r"]
        fate, kept = parked.taken.result(), dict(moves_of(source).caches._kept)
        StagedWorker.go_on.set()
        await moving
        await asyncio.sleep(1.0)

        assert fate is False
        assert not kept
        assert cluster.num_sampled < 25
        assert all(not engine.requests.running for engine in cluster.engines)


class SlowlyExporting(ScriptedEngine):
    async def export(self, request_id, *, with_cache=False):
        work = await super().export(request_id, with_cache=with_cache)
        await asyncio.sleep(0.5)
        return work


@virtual
async def test_the_cache_of_one_whose_asker_goes_away_while_it_is_taken_out_is_not_kept(tmp_path, monkeypatch):
    monkeypatch.setitem(ENGINES, "scripted", f"{__name__}:SlowlyExporting")
    async with bench(tmp_path) as cluster:
        asked = cluster.ask(REQUEST)
        await cluster.sampled(20)
        source = next(engine for engine in cluster.engines if engine.requests.running)
        moving = cluster.move()
        await asyncio.sleep(0.1)
        asked.cancel()
        await moving

        assert not moves_of(source).caches._kept
        assert all(not engine.requests.running for engine in cluster.engines)


@virtual
async def test_one_that_its_engine_takes_out_too_late_goes_on_where_it_is(tmp_path, monkeypatch):
    """As where a step lasts longer than the proxy waits."""
    monkeypatch.setitem(ENGINES, "scripted", f"{__name__}:SlowlyExporting")
    monkeypatch.setattr("rubato.actors.moves.proxy_moves.PREPARE_S", 0.1)
    async with bench(tmp_path) as cluster:
        expected = await unmoved(cluster)
        asked = cluster.ask(REQUEST)
        await cluster.sampled(80)
        source = cluster.source

        moved = await cluster.move()
        completion = await asked

        assert isinstance(moved, NotMoved)
        assert completion.engine == source
        assert completion.tokens == expected.tokens


@virtual
async def test_what_can_not_move_is_told_in_a_sentence_and_stays(tmp_path):
    async with bench(tmp_path) as cluster:
        asked = cluster.ask(REQUEST)
        await cluster.sampled(5)
        source = cluster.source

        whys = [(await cluster.move("engine-9")).why, (await cluster.move(source)).why, (await cluster.move("engine-1", "nobody")).why]
        completion = await asked

    assert whys[0] == "engine-9 is no engine that is here; there are engine-1, engine-2"
    assert whys[1] == f"r is on {source} already"
    assert whys[2] == "no engine runs nobody"
    assert completion.engine == source


@virtual
async def test_an_engine_that_can_not_export_keeps_its_requests(tmp_path, monkeypatch):
    monkeypatch.setattr("rubato.actors.scripted.engine.ScriptedEngine.capabilities", frozenset())
    async with bench(tmp_path) as cluster:
        asked = cluster.ask(REQUEST)
        await cluster.sampled(5)
        moved = await cluster.move()

        assert "its engine has not the capability export" in moved.why
        assert (await asked).engine == cluster.engines[0].name or (await asked).engine == cluster.engines[1].name
        assert cluster.num_sampled == NUM


@virtual
async def test_an_engine_that_drains_while_a_request_leaves_it_hands_it_over_once(tmp_path):
    async with bench(tmp_path) as cluster:
        expected = await unmoved(cluster)
        asked = cluster.ask(REQUEST)
        await cluster.sampled(NUM + 20)
        source = cluster.source
        StagedWorker.stage = "take"
        moving = cluster.move()
        await StagedWorker.reached.wait()
        draining = cluster.tasks.create_task(cluster.drain(source))
        await asyncio.sleep(0.01)
        StagedWorker.go_on.set()
        completion = await asked
        await moving
        await draining

        assert completion.tokens == expected.tokens
        assert cluster.num_sampled == 2 * NUM


@virtual
async def test_a_take_of_an_earlier_move_gets_nothing(tmp_path):
    """It was called off since, and the request is parked for another target now."""
    async with bench(tmp_path, engines=3) as cluster:
        asked = cluster.ask(REQUEST)
        await cluster.sampled(5)
        engine = next(e for e in cluster.engines if e.requests.running)
        incarnation = engine.incarnation
        others = [e.name for e in cluster.engines if e is not engine]
        assert isinstance(await moves_of(engine).prepare_move(PrepareMove("r", 1, others[0], 0)), MovePrepared)
        moves_of(engine).departures.keep("r", 1)
        await cluster.sampled(8)
        assert isinstance(await moves_of(engine).prepare_move(PrepareMove("r", 2, others[1], 0)), MovePrepared)

        late = await moves_of(engine).take_move(TakeMove("r", 1, incarnation))
        older = await moves_of(engine).prepare_move(PrepareMove("r", 1, others[0], 0))
        moves_of(engine).departures.keep("r", 1)
        taken = await moves_of(engine).take_move(TakeMove("r", 2, incarnation))
        again = await moves_of(engine).take_move(TakeMove("r", 2, incarnation))
        moves_of(engine).departures.keep("r", 2)

        assert isinstance(late, NotMoved)
        assert isinstance(older, NotMoved)
        assert isinstance(taken, Ack)
        assert isinstance(again, Ack)
        assert "r" not in engine.requests.running or parked_by(engine).settle(False)
        assert len((await asked).tokens.ids) // 4 == NUM


# -- before it began -----------------------------------------------------------------------------------------------------


def have_weights(cluster, version):
    """As if these had just been taken everywhere."""
    for engine in cluster.engines:
        engine._weights._held = 0, version
        engine._weights.wake_waiters()


@virtual
async def test_a_request_that_still_waits_for_weights_moves_and_waits_where_it_is_then(tmp_path):
    async with bench(tmp_path) as cluster:
        asked = cluster.ask(LATER)
        await asyncio.sleep(1.0)
        source = cluster.source
        moved = await cluster.move()
        await asyncio.sleep(1.0)
        running = {engine.name: list(engine.requests.running) for engine in cluster.engines}
        have_weights(cluster, 1)
        completion = await asked

    assert isinstance(moved, Moved)
    assert moved.engine != source
    assert running == {source: [], moved.engine: ["r"]}
    assert completion.engine == moved.engine
    assert len(completion.tokens.ids) // 4 == cluster.num_sampled == NUM


@virtual
async def test_a_request_that_waits_for_weights_stays_where_its_move_is_called_off(tmp_path):
    async with bench(tmp_path) as cluster:
        asked = cluster.ask(LATER)
        await asyncio.sleep(1.0)
        source = cluster.actors[cluster.source]
        prepared = await moves_of(source).prepare_move(PrepareMove("r", 1, "engine-9", 0))
        have_weights(cluster, 1)
        await asyncio.sleep(1.0)
        begun_early = cluster.num_sampled
        moves_of(source).departures.keep("r", 1)
        completion = await asked

    assert isinstance(prepared, MovePrepared)
    assert prepared.tokens == REQUEST.resumed
    assert begun_early == 0
    assert completion.engine == source.name
    assert cluster.num_sampled == NUM


@virtual
async def test_a_request_that_is_aborted_while_it_is_parked_without_weights_ends_here(tmp_path):
    async with bench(tmp_path) as cluster:
        asked = cluster.ask(LATER)
        await asyncio.sleep(1.0)
        source = cluster.actors[cluster.source]
        await moves_of(source).prepare_move(PrepareMove("r", 1, "engine-9", 0))
        await cluster.ask(Abort("r"))
        aborted = await asked
        late = await moves_of(source).take_move(TakeMove("r", 1, source.incarnation))

    assert isinstance(aborted, Aborted)
    assert isinstance(late, NotMoved)


# -- with its cache or without --------------------------------------------------------------------------------------------


class Prefilling(ScriptedEngine):
    """Says that it prefills so many tokens a second."""

    tokens_s = 0.0

    def load(self):
        return super().load()._replace(prefill_tokens_s=self.tokens_s)


@pytest.mark.parametrize(("tokens_s", "link_bytes_s", "with_cache"), [(0.0, 0.0, True), (1e3, 1e6, True), (1e6, 1e3, False)])
@virtual
async def test_the_cache_travels_where_the_link_is_sooner_there_than_a_prefill(tmp_path, monkeypatch, tokens_s, link_bytes_s, with_cache):
    monkeypatch.setattr(Prefilling, "tokens_s", tokens_s)
    monkeypatch.setitem(ENGINES, "scripted", f"{__name__}:Prefilling")
    async with bench(tmp_path) as cluster:
        asked = cluster.ask(REQUEST)
        await cluster.sampled(5)
        source = next(engine for engine in cluster.engines if engine.requests.running)
        for _ in range(FEW):
            moves_of(source).caches.link.saw(int(link_bytes_s), 1.0)
        moves_of(source).departures._bytes_per_token = 4.0
        prepared = await moves_of(source).prepare_move(PrepareMove("r", 1, "engine-9", 0))
        kept = list(moves_of(source).caches._kept)
        moves_of(source).departures.keep("r", 1)
        await asked

    assert kept == ([("r", 1)] if with_cache else [])
    assert ("unknown" if not tokens_s else "prefilling") in prepared.why


@virtual
async def test_a_cache_of_other_weights_stays_behind(tmp_path):
    async with bench(tmp_path) as cluster:
        asked = cluster.ask(REQUEST)
        await cluster.sampled(5)
        source = next(engine for engine in cluster.engines if engine.requests.running)
        prepared = await moves_of(source).prepare_move(PrepareMove("r", 1, "engine-9", 7))
        moves_of(source).departures.keep("r", 1)
        await asked

    assert prepared.why == "its cache is of other weights"


class WiredCluster(Cluster):
    """On the real bus, as within a host or between hosts."""

    bind = ""

    def transport(self, identity):
        return ZmqTransport(identity, self.bind or f"ipc://{self.folder}/{identity.name}")


async def test_a_cache_that_is_larger_than_a_frame_travels(tmp_path, monkeypatch):
    """Of a request that moves, and of one that is handed over."""
    monkeypatch.setitem(ENGINES, "scripted", f"{__name__}:LargeCaches")
    monkeypatch.setattr(LargeCaches, "took", [])
    async with asyncio.TaskGroup() as tasks:
        cluster = WiredCluster(tasks, tmp_path)
        for i, serves in enumerate(["prefill", "decode", "decode"], 1):
            slow = ScriptedSection(token_s=0.2, stop_share=0.0)
            section = WORKER.engine.model_copy(update={"serves": serves, "scripted": slow})
            await cluster.start(EngineWorker, f"engine-{i}", engine=section)
        await cluster.start(LLMProxy, "llm_proxy-1")
        ref = (await cluster.start(Asker, "env_manager-1")).ref("llm_proxy")
        asked = tasks.create_task(ref.ask(Generate("r", "s", REQUEST.prompt, Sampling(200)), timeout=60.0))
        running = cluster.actors["llm_proxy-1"].requests.running
        await cluster.until(lambda: LargeCaches.took and running["r"].num_tokens > 2)
        shared = running["r"]
        target = "engine-2" if shared.engine == "engine-3" else "engine-3"
        assert isinstance(await ref.ask(Move("r", target), timeout=30.0), Moved)
        await cluster.until(lambda: len(LargeCaches.took) == 2)
        await ref.ask(Abort("r"), timeout=30.0)
        await asked
        for name in reversed(list(cluster.actors)):
            await cluster.drain(name)

    assert min(LargeCaches.took) > MAX_BODY_BYTES


@pytest.mark.slow
@pytest.mark.parametrize("bind", ["", "tcp://127.0.0.1:*"])
async def test_torch_engines_hand_over_keys_and_values_and_go_on_token_for_token(tmp_path, monkeypatch, bind):
    monkeypatch.setattr(WiredCluster, "bind", bind)
    monkeypatch.setattr("rubato.actors.moves.caches.PART_BYTES", 70_000)  # more than travels within a message's body
    folder = write_model(tmp_path / "model")
    section = EngineSection(kind="torch", num_slots=2, max_len=1024, stream_every=1)
    config = EngineWorker.Config(model=ModelSection(path=str(folder), device="cpu"), engine=section)
    request = Generate("r", "s", pack_i32(range(3, 40)), Sampling(1000, seed=5))
    taken = []
    async with asyncio.TaskGroup() as tasks:
        cluster = WiredCluster(tasks, tmp_path)
        for name in ("engine-1", "engine-2"):
            await cluster.start(EngineWorker, name, **dict(config))
        await cluster.start(LLMProxy, "llm_proxy-1")
        await cluster.start(Asker, "env_manager-1")
        ref = cluster.actors["env_manager-1"].ref("llm_proxy")
        expected = await ref.ask(Generate("unmoved", "s", request.prompt, request.sampling), timeout=60.0)
        asked = tasks.create_task(ref.ask(request, timeout=60.0))
        for moves in range(2):
            shared = await running(cluster, moves)
            target = "engine-1" if shared.engine == "engine-2" else "engine-2"
            arrive = moves_of(cluster.actors[target]).departures.arrive
            moves_of(cluster.actors[shared.engine]).caches.link = Rate()  # of a known one its rate would decide

            async def arrived(work, moved, arrive=arrive):
                taken.append(await arrive(work, moved))
                return taken[-1]

            moves_of(cluster.actors[target]).departures.arrive = arrived
            assert isinstance(await ref.ask(Move("r", target), timeout=30.0), Moved)
        completion = await asked
        for name in ("env_manager-1", "llm_proxy-1", "engine-1", "engine-2"):
            await cluster.drain(name)

    assert [work.cache is not None for work in taken] == [True, True]
    assert all(len(work.cache.data) > 70_000 for work in taken)
    assert completion.tokens.ids == expected.tokens.ids
    assert completion.tokens.spans == expected.tokens.spans


async def running(cluster, moves: int):
    """The request, once it was sampled from again."""
    while True:
        shared = cluster.actors["llm_proxy-1"].requests.running.get("r")
        if shared is not None and shared.asked is not None and shared.num_tokens > 100 * (moves + 1):
            return shared
        await asyncio.sleep(0.001)
