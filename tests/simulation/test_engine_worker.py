"""EngineWorker with the scripted engine, as a kernel on the memory transport and the virtual loop."""

import asyncio
import functools
import json
import struct

import pytest
from tokenizers import Tokenizer

from rubato.actors.engines.engine import EngineDead
from rubato.actors.engines.section import EngineSection, PaceSection, ScriptedSection
from rubato.actors.engines.worker import EngineWorker, first_of
from rubato.actors.messages.engines import Reconfigure, SleepEngine, WakeEngine
from rubato.actors.messages.generation import (
    Abort,
    Aborted,
    Completion,
    Generate,
    HandedBack,
    InfoChanged,
    Inspect,
    Resume,
    Sampling,
    Suspend,
    TokensSampled,
    VersionSpan,
)
from rubato.actors.messages.weights import HoldWeights, WeightsPublished
from rubato.actors.scripted.engine import ScriptedEngine
from rubato.bus.errors import Failed
from rubato.bus.link import Identity
from rubato.bus.memory import MemoryNetwork, MemoryTransport
from rubato.bus.message import Ack, unpack_i32
from rubato.planning.engine_info import WeightsNeed
from rubato.runtime.actor import Actor, RunInfo, handler
from rubato.runtime.blobs.blob import BlobMissing
from rubato.runtime.config import ActorConfig
from rubato.runtime.kernel import Kernel
from rubato.runtime.memory import MemoryBlobStore, MemoryStore
from rubato.runtime.observe.log import logger
from rubato.sim.virtual import run_virtual
from tests.chat_models import chat_model


class Proxy(Actor):
    """Asks, and keeps what engines report."""

    role = "llm_proxy"

    def __init__(self, config, kernel):
        super().__init__(config, kernel)
        self.reports: list[TokensSampled] = []
        self.holds: list[tuple[int, bool]] = []
        self.states: list[tuple[bool, int]] = []

    @handler
    async def tokens_sampled(self, message: TokensSampled) -> None:
        self.reports.append(message)

    @handler
    async def engine_changed(self, message: InfoChanged) -> Ack:
        info = message.info
        self.holds.append((info.version, info.pinned))
        self.states.append((info.asleep, info.degree))
        return Ack()


class CutBlobs(MemoryBlobStore):
    """As where another host has the weights: they are known of, and can't be fetched while the link to it is `cut`."""

    cut = False

    async def get(self, name, version, *, check=True):
        if self.cut:
            raise BlobMissing(f"{name} {version}: no host gave it")
        return await super().get(name, version, check=check)


class Bench:
    """One engine worker, and a proxy to ask it from."""

    def __init__(self, tasks, folder):
        self.tasks, self.folder = tasks, folder
        self.network, self.store, self.blobs = MemoryNetwork(), MemoryStore(), CutBlobs()
        self.kernels, self.serving = {}, {}

    async def start(self, actor_class, name, config):
        incarnation = await self.store.increment("incarnation")
        kernel = self.kernels[name] = Kernel(
            actor_class,
            config,
            name=name,
            incarnation=incarnation,
            run=RunInfo("test", self.folder, 7, 1),
            transport=MemoryTransport(Identity("test", name, incarnation), self.network),
            store=self.store,
            blobs=self.blobs,
            log=logger("rubato.test"),
        )
        actor = kernel.build()
        self.serving[name] = self.tasks.create_task(kernel.serve(), name=name)
        await kernel.ready.wait()
        return actor

    async def start_engine(self, **options):
        section = EngineSection(**({"kind": "scripted", "max_len": 4096, "scripted": ScriptedSection(token_s=0.01)} | options))
        return await self.start(EngineWorker, "engine-1", EngineWorker.Config(engine=section))

    def ask(self, message, timeout=60.0):
        return self.kernels["llm_proxy-1"].ref("engine-1").ask(message, timeout=timeout)

    async def publish(self, version, term=1, *, tell=True):
        info = await self.blobs.put("weights", version, term, [image()])
        if tell:
            message = WeightsPublished(version, term, info.digest, info.size_bytes)
            await self.kernels["llm_proxy-1"].ref("engine-1").tell(message)


def image() -> bytes:
    header = json.dumps({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    return struct.pack("<Q", len(header)) + header + bytes(4)


def simulated(**options):
    """Run the test on the virtual loop under several task orders, with a worker started with `options`."""

    def wrap(test):
        @functools.wraps(test)
        def run(tmp_path):
            async def main():
                async with asyncio.TaskGroup() as tasks:
                    bench = Bench(tasks, tmp_path)
                    bench.proxy = await bench.start(Proxy, "llm_proxy-1", ActorConfig())
                    worker = await bench.start_engine(**options)
                    await bench.ask(Inspect())
                    await test(bench, worker)
                    for kernel in bench.kernels.values():
                        kernel.stop()

            for seed in range(4):
                run_virtual(main, seed=seed)

        del run.__wrapped__  # pytest reads the signature: the bench is no fixture
        return run

    return wrap


def request(request_id="r", num=10, **fields):
    need = WeightsNeed(fields.pop("min_version", 0), fields.pop("exact", False))
    fields = {"session": "s", "prompt": struct.pack("<3i", 5, 6, 7), "sampling": Sampling(num), "weights": need} | fields
    return Generate(request_id, **fields)


@simulated()
async def test_a_generate_is_answered_with_all_tokens_and_their_version(bench, worker):
    reply = await bench.ask(request())

    assert isinstance(reply, Completion)
    assert (reply.request_id, reply.finish_reason, reply.engine) == ("r", "length", "engine-1")
    assert reply.tokens.spans == (VersionSpan(0, 0, 10),)
    assert len(unpack_i32(reply.tokens.ids)) == 10


@simulated()
async def test_asking_again_joins_the_request_or_returns_its_result(bench, worker):
    first = bench.tasks.create_task(bench.ask(request()))
    await asyncio.sleep(0.05)
    second = bench.tasks.create_task(bench.ask(request()))
    await asyncio.sleep(0.01)
    running = (await bench.ask(Inspect())).running

    replies = [await first, await second, await bench.ask(request())]

    assert running == ("r",)
    assert replies[0] == replies[1] == replies[2]
    assert worker.metrics.snapshot()["engine/tokens"] == 10
    assert (await bench.ask(Inspect())).finished == ("r",)


@simulated(results_kept=2)
async def test_only_the_newest_results_are_kept(bench, worker):
    for i in range(4):
        await bench.ask(request(f"r{i}"))

    assert (await bench.ask(Inspect())).finished == ("r2", "r3")


@simulated()
async def test_cancelling_the_only_ask_ends_the_request_but_not_one_that_others_joined(bench, worker):
    lonely = bench.tasks.create_task(bench.ask(request("lonely", 1000)))
    shared = [bench.tasks.create_task(bench.ask(request("shared", 20))) for _ in range(2)]
    await asyncio.sleep(0.05)

    lonely.cancel()
    shared[0].cancel()
    await asyncio.sleep(0.05)
    running = (await bench.ask(Inspect())).running
    again = await bench.ask(request("lonely", 3))

    assert running == ("shared",)
    assert len(unpack_i32((await shared[1]).tokens.ids)) == 20
    assert len(unpack_i32(again.tokens.ids)) == 3


@simulated()
async def test_an_abort_is_answered_with_the_tokens_so_far(bench, worker):
    asking = bench.tasks.create_task(bench.ask(request(num=1000)))
    await asyncio.sleep(0.1)

    await bench.ask(Abort("r", "too old"))
    reply = await asking

    assert isinstance(reply, Aborted)
    assert reply.reason == "too old"
    assert 5 <= len(unpack_i32(reply.tokens.ids)) <= 12


@simulated()
async def test_no_token_is_sampled_under_an_older_version_than_asked_for(bench, worker):
    asking = bench.tasks.create_task(bench.ask(request(min_version=2)))
    await asyncio.sleep(1.0)
    sampled_early = asking.done()

    await bench.publish(1)
    await bench.publish(2)
    reply = await asking

    assert not sampled_early
    assert reply.tokens.spans == (VersionSpan(2, 0, 10),)


@simulated(scripted=ScriptedSection(token_s=0.01, update_s=0.5))
async def test_an_engine_decodes_while_it_pulls_and_tells_how_long_pull_and_pause_took(bench, worker):
    get = bench.blobs.get

    async def slow(*args, **options):
        await asyncio.sleep(2.0)
        return await get(*args, **options)

    bench.blobs.get = slow
    asking = bench.tasks.create_task(bench.ask(request(num=180)))
    await asyncio.sleep(0.1)

    await bench.publish(1)
    reply = await asking
    await worker._weights.wait_for(1)

    figures = worker.metrics.snapshot()
    assert reply.tokens.spans == (VersionSpan(0, 0, 180),)
    assert 2.5 <= figures["weights/pull_s_p50"] < 2.6
    assert figures["weights/pause_s_p50"] == 0.5


@simulated()
async def test_an_engine_that_stops_while_it_pulls_takes_the_weights_no_more(bench, worker):
    get, engine = bench.blobs.get, worker._engine
    ended = []

    async def slow(*args, **options):
        await asyncio.sleep(2.0)
        return await get(*args, **options)

    async def gone(*_):
        raise EngineDead("the engine is not running: start it first")

    async def stop():
        engine.update = gone
        await asyncio.sleep(5.0)
        ended.append(True)

    bench.blobs.get, engine.stop = slow, stop
    await bench.publish(1)
    await asyncio.sleep(0.1)

    bench.kernels["engine-1"].stop()
    await bench.serving["engine-1"]

    assert ended == [True]


@simulated()
async def test_a_request_that_waits_for_weights_can_be_aborted(bench, worker):
    asking = bench.tasks.create_task(bench.ask(request(min_version=5)))
    await asyncio.sleep(0.1)

    await bench.ask(Abort("r"))

    assert await asking == Aborted("r", request().resumed, "asked")


@simulated()
async def test_a_lost_announcement_is_made_up_for(bench, worker):
    await bench.publish(4, tell=False)

    await asyncio.sleep(2.5)

    assert (await bench.ask(Inspect())).info.version == 4


@simulated(check_s=30.0)
async def test_a_pull_that_failed_is_made_again_soon_while_a_request_waits_for_it(bench, worker):
    bench.blobs.cut = True
    await bench.publish(1)
    asking = bench.tasks.create_task(bench.ask(request(min_version=1)))
    await asyncio.sleep(4.0)

    bench.blobs.cut = False
    await asyncio.sleep(4.0)

    assert asking.done()
    assert (await asking).tokens.spans == (VersionSpan(1, 0, 10),)


@simulated(check_s=30.0)
async def test_a_pull_that_failed_is_made_again_when_somebody_joins(bench, worker):
    bench.blobs.cut = True
    await bench.publish(1)
    asking = bench.tasks.create_task(bench.ask(request(min_version=1)))
    await asyncio.sleep(20.0)

    bench.blobs.cut = False
    await worker.on_peers(("node-2",), ())
    await asyncio.sleep(0.2)

    assert asking.done()


@simulated()
async def test_a_request_in_flight_goes_on_across_a_swap(bench, worker):
    asking = bench.tasks.create_task(bench.ask(request(num=40)))
    await asyncio.sleep(0.1)

    await bench.publish(1)
    spans = (await asking).tokens.spans

    assert [span.version for span in spans] == [0, 1]
    assert (spans[0].start, spans[0].end, spans[1].end) == (0, spans[1].start, 40)


@simulated()
async def test_a_higher_term_replaces_the_same_version_and_an_older_one_is_not_taken(bench, worker):
    await bench.publish(3, term=1)
    await asyncio.sleep(0.1)
    await bench.publish(3, term=2)
    await asyncio.sleep(0.1)

    assert worker.metrics.snapshot()["weights/version"] == 3
    assert len(worker.metrics._recent["weights/pause_s"]) == 2


@simulated()
async def test_a_restarted_engine_begins_with_the_newest_weights(bench, worker):
    await bench.publish(6, tell=False)
    bench.kernels["engine-1"].stop()
    await bench.serving["engine-1"]

    await bench.start_engine()

    assert (await bench.ask(Inspect())).info.version == 6


@simulated()
async def test_a_suspended_engine_samples_nothing_until_it_is_resumed(bench, worker):
    await bench.ask(Suspend())
    asking = bench.tasks.create_task(bench.ask(request()))
    await asyncio.sleep(1.0)
    status, early = await bench.ask(Inspect()), asking.done()

    await bench.ask(Resume())

    assert status.info.suspended
    assert not early
    assert isinstance(await asking, Completion)


@simulated()
async def test_long_requests_report_their_progress_without_a_gap(bench, worker):
    reply = await bench.ask(request(num=50))

    reports = [tokens for message in bench.proxy.reports for request_id, tokens in message.progress if request_id == "r"]
    spans = [span for tokens in reports for span in tokens.spans]
    assert len(reports) == 3
    assert [(span.start, span.end) for span in spans] == [(0, 16), (16, 32), (32, 48)]
    assert b"".join(tokens.ids for tokens in reports) == reply.tokens.ids[: 48 * 4]


@simulated()
async def test_resumed_tokens_begin_the_reply_and_count_in_positions(bench, worker):
    whole = await bench.ask(request("a", 40))
    cut = Aborted("a", whole.tokens, "").tokens
    resumed = type(cut)(cut.ids[: 4 * 20], cut.logprobs[: 4 * 20], (VersionSpan(0, 0, 20),))

    reply = await bench.ask(request("b", 40, resumed=resumed))

    assert reply.tokens == whole.tokens
    assert bench.proxy.reports[-1].progress[0][1].spans == (VersionSpan(0, 20, 36),)


@simulated()
async def test_a_draining_engine_hands_its_requests_back_with_their_tokens(bench, worker):
    asking = [bench.tasks.create_task(bench.ask(request(f"r{i}", 1000))) for i in range(5)]
    await asyncio.sleep(0.1)

    bench.kernels["engine-1"].stop()
    replies = [await ask for ask in asking]

    assert {type(reply) for reply in replies} == {HandedBack}
    assert all(len(reply.tokens.ids) >= 20 for reply in replies)


class EndsBetweenSteps(ScriptedEngine):
    """As one whose requests end between two steps of a tenth of a second."""

    async def abort(self, request_id):
        await asyncio.sleep(0.1)
        await super().abort(request_id)


@simulated(kind=f"{__name__}:EndsBetweenSteps")
async def test_a_draining_engine_hands_all_of_its_requests_back_within_one_step(bench, worker):
    loop = asyncio.get_running_loop()
    asking = [bench.tasks.create_task(bench.ask(request(f"r{i}", 1000))) for i in range(5)]
    await asyncio.sleep(0.1)
    began = loop.time()

    bench.kernels["engine-1"].stop()
    replies = [await ask for ask in asking]

    assert {type(reply) for reply in replies} == {HandedBack}
    assert loop.time() - began < 0.15  # of virtual time


@simulated()
async def test_a_request_that_can_never_run_fails_its_ask_only(bench, worker):
    try:
        await bench.ask(request(prompt=b""))
    except Failed as error:
        refused = str(error)

    assert "empty prompt" in refused
    assert isinstance(await bench.ask(request("other")), Completion)


@simulated(num_slots=8)
async def test_more_requests_than_slots_all_finish(bench, worker):
    asking = [bench.tasks.create_task(bench.ask(request(f"r{i}", 5))) for i in range(100)]

    replies = [await ask for ask in asking]

    assert all(len(reply.tokens.ids) == 20 for reply in replies)
    assert (await bench.ask(Inspect())).running == ()


@simulated()
async def test_a_held_engine_takes_nothing_newer_until_it_is_let_go_and_its_proxy_knows(bench, worker):
    asking = bench.tasks.create_task(bench.ask(HoldWeights(1, 1, 60.0)))
    await asyncio.sleep(0.01)
    assert not asking.done()  # the version is not there yet
    await bench.publish(1)
    assert (await asking).held
    assert bench.proxy.holds == [(1, True)]

    await bench.publish(2)
    exact = await bench.ask(request("exact", 100, min_version=1, exact=True))
    assert exact.tokens.spans == (VersionSpan(1, 0, 100),)
    assert (await bench.ask(Inspect())).info.pinned

    assert not (await bench.ask(HoldWeights(0, 1, 0.0))).held
    assert (await bench.ask(Inspect())).info.pinned  # a late word about another version lets go of nothing
    assert not (await bench.ask(HoldWeights(1, 1, 0.0))).held
    newer = await bench.ask(request("newer", 1, min_version=2))
    assert newer.tokens.spans[0].version == 2
    assert bench.proxy.holds[:3] == [(1, True), (1, True), (1, False)]
    late = await bench.ask(request("late", 1, min_version=1, exact=True))
    assert late.reason == "engine-1 does not hold version 1 any more"


@simulated(check_s=1.0)
async def test_a_hold_that_is_not_renewed_ends_by_itself_and_so_does_one_of_an_older_term(bench, worker):
    await bench.publish(1)
    assert (await bench.ask(HoldWeights(1, 1, 5.0))).held
    await bench.publish(2)
    await asyncio.sleep(8.0)
    assert worker.metrics.snapshot()["weights/version"] == 2
    assert bench.proxy.holds[-1] == (2, False)

    assert not (await bench.ask(HoldWeights(1, 1, 5.0))).held
    assert (await bench.ask(HoldWeights(2, 1, 500.0))).held
    await bench.publish(2, term=2)
    await asyncio.sleep(1.0)
    assert (await bench.ask(HoldWeights(2, 2, 5.0))).held


@simulated(pace=PaceSection(hardware="h20", model="qwen3-8b"))
async def test_a_paced_engine_tells_how_many_steps_it_took_and_the_share_that_outlasted_their_pace(bench, worker):
    began = asyncio.get_running_loop().time()
    await bench.ask(request())
    took_s = asyncio.get_running_loop().time() - began
    await bench.publish(1)
    await bench.ask(request("s", min_version=1))
    await asyncio.sleep(1.0)

    figures = worker.metrics.snapshot()
    assert (figures["paced/engines"], figures["paced/outlasted_frac"]) == (1.0, 0.0)
    assert figures["paced/steps"] == 10 + 1 + 10
    assert 9 * 0.005 < took_s < 10 * 0.01  # a step reads 16 GB at 2.9 TB/s
    assert 0.9 < figures["weights/pause_s_max"] < 1.0


@simulated()
async def test_an_engine_without_a_pace_says_nothing_of_one(bench, worker):
    await bench.ask(request())
    await asyncio.sleep(1.0)

    assert not [name for name in worker.metrics.snapshot() if name.startswith("paced/")]


@simulated()
async def test_who_is_told_to_sleep_keeps_its_requests_and_its_proxy_knows_first(bench, worker):
    asked = bench.tasks.create_task(bench.ask(request()))
    await asyncio.sleep(0.035)

    slept = await bench.ask(SleepEngine())
    states = list(bench.proxy.states)
    await asyncio.sleep(5.0)
    sampled, status = worker.metrics.snapshot()["engine/tokens"], await bench.ask(Inspect())
    woken = await bench.ask(WakeEngine())

    assert [(each.info.name, each.info.degree, each.seconds) for each in (slept, woken)] == [("engine-1", 1, 0.0)] * 2
    assert (slept.info.asleep, woken.info.asleep) == (True, False)
    assert states[0] == states[-1] == (True, 1)
    assert bench.proxy.states[-1] == (False, 1)
    assert (sampled, status.running, status.info.asleep) == (3, ("r",), True)
    assert (await asked).finish_reason == "length"


@simulated(pace=PaceSection(hardware="h20", model="qwen3-8b"))
async def test_another_degree_is_carried_out_once_and_an_order_of_before_is_refused(bench, worker):
    asked = bench.tasks.create_task(bench.ask(request(num=100)))
    await asyncio.sleep(0.1)

    changed = await bench.ask(Reconfigure(4, term=7))
    again = await bench.ask(Reconfigure(4, term=7))
    with pytest.raises(Failed, match="refused an order of term 6: engine-1 has carried out one of term 7"):
        await bench.ask(Reconfigure(2, term=6))

    assert (changed.info.name, changed.info.degree, changed.info.asleep) == ("engine-1", 4, False)
    assert changed.seconds > 0.0
    assert (again.seconds, again.info.degree) == (0.0, 4)
    assert bench.proxy.states[-1] == (False, 4)
    assert (await bench.ask(Inspect())).info.degree == 4
    assert (await asked).finish_reason == "length"


@simulated(pace=PaceSection(hardware="h20", model="qwen3-8b"))
async def test_an_order_that_can_not_be_is_refused_in_a_sentence_and_counts_for_nothing(bench, worker):
    with pytest.raises(Failed, match="degree=3 does not divide the 32 attention heads"):
        await bench.ask(Reconfigure(3, term=9))
    with pytest.raises(Failed, match="level=3 is no level of sleep"):
        await bench.ask(SleepEngine(3))
    assert bench.proxy.states[-1] == (False, 1)

    assert (await bench.ask(Reconfigure(2, term=8))).info.degree == 2


class Incapable(ScriptedEngine):
    capabilities = frozenset()


@simulated(kind=f"{__name__}:Incapable")
async def test_an_engine_without_the_capability_refuses_in_a_sentence(bench, worker):
    for order in (SleepEngine(), WakeEngine(), Reconfigure(2, 0)):
        with pytest.raises(Failed, match=r"Incapable has not the capability (sleep|reconfigure) .*engine\.kind"):
            await bench.ask(order)


async def sampled_with_a_text(bench, num=200):
    """(tokens of a request, a text of two of them, how many there are up to its end), whose model folder knows bytes."""
    raw = Tokenizer.from_file(str(chat_model(bench.folder) / "tokenizer.json"))
    whole = (await bench.ask(request("whole", num))).tokens
    ids = unpack_i32(whole.ids)
    texts = ["".join(raw.decode([token]) for token in ids[at : at + 2]) for at in range(20, num)]
    text = next(each for each in texts if len(each) == 2 and each.isascii() and each.isprintable())
    return whole, text, next(end for end in range(num) if text in raw.decode(ids[:end], skip_special_tokens=False))


@simulated()
async def test_a_text_ends_a_completion_with_the_token_that_completes_it(bench, worker):
    whole, text, num = await sampled_with_a_text(bench)

    reply = await bench.ask(request("stopped", 200, sampling=Sampling(200, stop=("never", text))))

    assert (reply.finish_reason, reply.tokens) == ("stop", first_of(whole, num))
    assert (await bench.ask(Inspect())).running == ()
    assert worker._engine.load().running == 0
    assert all(len(tokens.ids) <= 4 * num for report in bench.proxy.reports for _, tokens in report.progress)


@simulated()
async def test_a_text_that_an_engine_before_has_sampled_ends_a_completion_at_once(bench, worker):
    whole, text, num = await sampled_with_a_text(bench)
    sampling = Sampling(200, stop=(text,))

    over, within = [
        await bench.ask(request(name, 200, sampling=sampling, resumed=first_of(whole, given)))
        for name, given in (("over", num + 5), ("within", num - 1))
    ]

    assert (over.finish_reason, over.tokens) == ("stop", first_of(whole, num))
    assert (within.finish_reason, within.tokens) == ("stop", first_of(whole, num))
