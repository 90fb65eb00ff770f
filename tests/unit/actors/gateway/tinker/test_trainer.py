"""The trainer: an operation counts once, and one that is killed goes on as if nothing had been."""

import asyncio
import struct
from contextlib import asynccontextmanager

import pytest
from safetensors.torch import load as load_tensors

from rubato.actors.config import LoraSection, ModelSection, TrainSection
from rubato.actors.engines.section import EngineSection
from rubato.actors.engines.worker import EngineWorker
from rubato.actors.gateway.tinker.state import read_saved
from rubato.actors.gateway.tinker.trainer import TinkerTrainer
from rubato.actors.messages.generation import Completion, Generate, Sampling, VersionSpan
from rubato.actors.messages.tinker import (
    Begin,
    Behind,
    Follow,
    ForgetModel,
    ForwardBackward,
    Load,
    Operate,
    Operated,
    OperationFailed,
    OptimStep,
    PrepareSampler,
    SamplerReady,
    SamplerRefused,
    Save,
    Score,
    Stepped,
    WithdrawSampler,
    changes,
)
from rubato.actors.proxy.proxy import LLMProxy
from rubato.bus.link import Identity
from rubato.bus.memory import MemoryNetwork, MemoryTransport
from rubato.bus.message import pack_i32, unpack_f32, unpack_i32
from rubato.planning.engine_info import WeightsNeed
from rubato.runtime.actor import Actor, RunInfo
from rubato.runtime.config import ActorConfig
from rubato.runtime.kernel import Kernel
from rubato.runtime.memory import MemoryBlobStore, MemoryStore
from rubato.runtime.observe.log import logger
from tests.unit.actors.gateway.tinker.conftest import BEGIN, ROWS, sampled, taught

PROMPT = (5, 6, 7, 8)


class Client(Actor):
    """Asks the trainer, and keeps what it asked for until a checkpoint covers it."""

    role = "tinker"

    def __init__(self, config, kernel):
        super().__init__(config, kernel)
        self.logs, self.outcomes = {}, {}

    async def ask(self, request, of="trainer-1"):
        return await self.ref(of).ask(request, timeout=120.0)

    async def operate(self, *operations, model="m"):
        """One after the other; what the trainer lacks goes before. Returns the last reply."""
        for operation in operations:
            log = self.logs.setdefault(model, [])
            seq = log[-1][0] + 1 if log else 0
            log.append((seq, operation))
            reply = await self.sent(model, seq)
            if isinstance(reply, OperationFailed):
                log[-1] = (seq, None)
        return reply

    async def sent(self, model, seq):
        known = [(number, each) for number, each in self.logs[model] if each is not None and number <= seq]
        (_, operation), before = known[-1], [number for number, each in known[:-1] if changes(each)]
        while True:
            reply = await self.ask(Operate(model, seq, before[-1] if before else -1, operation))
            if not isinstance(reply, Behind):
                self.outcomes[model, seq] = reply
                return reply
            for number in (number for number in before if number > reply.covered):
                assert isinstance(await self.sent(model, number), Operated)


class Job:
    """A trainer, whose process may end at any time, and a client."""

    def __init__(self, tasks, folder):
        self._tasks, self.folder = tasks, folder
        self._network, self._store, self.blobs = MemoryNetwork(), MemoryStore(), MemoryBlobStore()
        self._serving = {}

    async def start(self, actor_class, name, config):
        incarnation = await self._store.increment("incarnation")
        kernel = Kernel(
            actor_class, config, name=name, incarnation=incarnation, run=RunInfo("test", self.folder, 7, 1),
            transport=MemoryTransport(Identity("test", name, incarnation), self._network),
            store=self._store, blobs=self.blobs, log=logger("rubato.test"),
        )  # fmt: skip
        actor = kernel.build()
        self._serving[name] = self._tasks.create_task(kernel.serve(), name=name)
        await kernel.ready.wait()
        return actor

    async def stop(self, name):
        serving = self._serving.pop(name)
        serving.cancel()
        await asyncio.wait([serving])

    async def stop_all(self):
        for name in list(self._serving):
            await self.stop(name)


@pytest.fixture
def job(base, tmp_path):
    """`async with job(…) as (client, trainer, made, begin_again)`: the last one kills the trainer and starts another."""

    @asynccontextmanager
    async def run(folder="run", every=100):
        config = TinkerTrainer.Config(model=ModelSection(path=str(base), device="cpu"), checkpoint={"every": every})
        async with asyncio.TaskGroup() as tasks:
            made = Job(tasks, tmp_path / folder)
            trainers = [await made.start(TinkerTrainer, "trainer-1", config)]
            client = await made.start(Client, "tinker-1", ActorConfig())

            async def begin_again():
                await made.stop("trainer-1")
                trainers.append(await made.start(TinkerTrainer, "trainer-1", config))
                return trainers[-1]

            yield client, lambda: trainers[-1], made, begin_again
            await made.stop_all()

    return run


def held(trainer, model="m"):
    """All that the model is, to the last bit."""
    files = trainer._tuned.files(model, optimizer=True, gradient=True)
    return {
        (file, name): tensor.numpy().tobytes()
        for file, content in files.items()
        if file != "adapter_config.json"
        for name, tensor in load_tensors(content).items()
    }


STEP = OptimStep(0.02)
WORK = [BEGIN, taught(rows=ROWS[:1]), taught(rows=ROWS[1:]), STEP, sampled("ppo"), STEP, sampled("gspo"), STEP, taught(), STEP, taught()]


async def test_an_operation_that_comes_again_counts_once(job):
    async with job() as (client, trainer, *_):
        await client.operate(BEGIN, taught())
        gathered, first = held(trainer()), client.outcomes["m", 1]

        again = await client.sent("m", 1)
        stepped = await client.operate(STEP)
        moved = held(trainer())
        both = await asyncio.gather(*(client.ask(Operate("m", 2, 1, STEP)) for _ in range(3)))

        assert again == first
        assert held(trainer()) == moved != gathered
        assert both == [stepped] * 3
        assert isinstance(stepped.outcome, Stepped)
        assert stepped.outcome.version == 1


@pytest.mark.parametrize("every", [1, 2, 100])
async def test_killed_after_any_operation_it_ends_where_it_would_have_undisturbed(job, every):
    async with job("undisturbed") as (client, trainer, *_):
        await client.operate(*WORK)
        expected, outcomes = held(trainer()), dict(client.outcomes)

    async with job(f"killed_{every}", every) as (client, trainer, _, begin_again):
        for each in WORK:
            await client.operate(each)
            await begin_again()
        await client.sent("m", len(WORK) - 1)

        assert held(trainer()) == expected
        assert [reply.outcome for reply in client.outcomes.values()] == [reply.outcome for reply in outcomes.values()]


async def test_killed_before_its_answer_it_gives_that_out_of_its_file(job, monkeypatch):
    async with job(every=1) as (client, trainer, _, begin_again):
        await client.operate(BEGIN, taught())
        stepped = await client.operate(STEP)
        moved = held(trainer())
        await trainer()._written(trainer()._models["m"])
        await begin_again()

        again = await client.ask(Operate("m", 2, 1, STEP))

        assert again == Operated(2, stepped.outcome, 2)
        assert held(trainer()) == moved


async def test_a_log_that_grows_without_a_step_is_cut_by_a_file_that_has_the_gradient(job, monkeypatch):
    monkeypatch.setattr("rubato.actors.gateway.tinker.trainer.LOG_BYTES", 10)
    async with job() as (client, trainer, _, begin_again):
        await client.operate(BEGIN, taught())
        expected = held(trainer())
        await trainer()._written(trainer()._models["m"])
        covered = (await client.sent("m", 1)).covered
        await begin_again()
        reply = await client.operate(sampled("ppo", forward_only=True))

        assert covered == 1
        assert isinstance(reply, Operated)
        assert held(trainer()) == expected


async def test_what_was_saved_is_loaded_with_its_optimiser_and_begins_another_model(job, tmp_path):
    whole, to_sample = tmp_path / "saves" / "1", tmp_path / "saves" / "2"
    async with job() as (client, trainer, _, begin_again):
        await client.operate(BEGIN, taught(), STEP, Save(str(whole)), Save(str(to_sample), optimizer=False))
        saved = held(trainer())
        await client.operate(taught(), STEP)
        loaded = await client.operate(Load(str(whole), optimizer=True))
        other = await client.operate(Begin("toy", 4, start=str(whole), optimizer=True), model="other")
        refused = await client.operate(Load(str(to_sample), optimizer=True))

        assert (read_saved(whole).begin, read_saved(whole).version, read_saved(to_sample).optimizer) == (BEGIN, 1, False)
        assert loaded.outcome.version == 3
        assert isinstance(other, Operated)
        assert held(trainer()) == held(trainer(), "other") == saved
        assert (refused.category, refused.reason) == ("user", f"{to_sample} holds no optimiser: it was saved to sample from")

        for name in ("m", "other"):  # what was loaded may be gone by now
            await client.operate(taught(), STEP, model=name)
        expected = held(trainer())
        (whole / "adapter_model.safetensors").unlink()
        await begin_again()
        for name in ("m", "other"):
            await client.operate(sampled("ppo", forward_only=True), model=name)
        assert held(trainer()) == held(trainer(), "other") == expected


async def test_what_fails_is_told_and_the_model_goes_on_without_it(job, tmp_path):
    async with job() as (client, trainer, _, begin_again):
        unknown = await client.operate(STEP, model="x")
        await client.operate(BEGIN, taught())
        before = held(trainer())
        bad = await client.operate(ForwardBackward("stable_reinforce", taught().data))
        missing = await client.operate(Load(str(tmp_path / "nowhere")))
        twice = await client.operate(BEGIN)
        named = await client.ask(Operate("../m", 0, -1, BEGIN))

        assert held(trainer()) == before
        replies = (unknown, bad, missing, twice, named)
        assert [type(each) for each in replies] == [OperationFailed] * 5
        assert {each.category for each in replies} == {"user"}
        assert [each.reason.split(":")[0] for each in replies[:4]] == [
            "there is no model x", "loss_fn=stable_reinforce is not there; there are cross_entropy, importance_sampling, ppo, cispo, dro, gspo",
            missing.reason.split(":")[0], "there is a model m already",
        ]  # fmt: skip

        await client.operate(STEP)
        moved = held(trainer())
        await begin_again()
        await client.operate(sampled("ppo", forward_only=True))
        assert held(trainer()) == moved


async def test_a_model_in_doubt_comes_back_from_its_file_and_asks_for_the_rest(job, monkeypatch):
    async with job(every=1) as (client, trainer, *_):
        await client.operate(BEGIN, taught(), STEP, taught())
        expected = held(trainer())

        def torn(*args):
            trainer()._tuned._bank._held["model:m"]._masters.popitem()
            raise RuntimeError("half-way")

        with monkeypatch.context() as patched:
            patched.setattr(trainer()._tuned, "optim_step", torn)
            with pytest.raises(Exception, match="half-way"):
                await client.ask(Operate("m", 4, 3, STEP))
        behind = await client.ask(Operate("m", 4, 3, STEP))
        await client.operate(sampled("ppo", forward_only=True))

        assert behind == Behind(2)
        assert held(trainer()) == expected


async def test_more_models_than_there_are_places_for_take_turns(job):
    async with job() as (client, trainer, *_):
        trainer()._tuned.most = 1
        for each in WORK:
            for name in ("a", "b"):
                await client.operate(each, model=name)
        names = trainer()._tuned._bank.names
        await client.operate(sampled("ppo", forward_only=True), model="a")
        found = held(trainer(), "a")

        await client.operate(*WORK, model="alone")

        assert names == ("model:b",)
        assert found == held(trainer(), "alone")


async def test_a_model_that_is_forgotten_leaves_nothing_and_its_name_is_free(job):
    async with job(every=1) as (client, trainer, made, _):
        await client.operate(BEGIN, Follow(), taught(), STEP)
        folder = made.folder / "tinker" / "trainer" / "m"
        await trainer()._written(trainer()._models["m"])
        there = folder.exists(), await made.blobs.newest("weights.m") is not None

        for _ in range(2):
            await client.ask(ForgetModel("m"))

        assert there == (True, True)
        assert not folder.exists()
        assert await made.blobs.newest("weights.m") is None
        client.logs.clear()
        assert isinstance(await client.operate(BEGIN), Operated)


async def complete(client, adapter, *, version=0):
    request = Generate(f"{adapter}.{version}", "s", pack_i32(PROMPT), Sampling(4, seed=3), WeightsNeed(version, False, adapter))
    return await client.ask(request, of="llm_proxy-1")


def gap(tuned, reply, **under):
    """Of the reply's log-probabilities to those of the trainer."""
    ids = unpack_i32(reply.tokens.ids)
    scored = unpack_f32(tuned.score(struct.pack(f"<{4 + len(ids)}i", *PROMPT, *ids), **under).logprobs)[4:]
    return max(abs(a - b) for a, b in zip(unpack_f32(reply.tokens.logprobs), scored, strict=True))


async def test_engines_sample_under_what_was_saved_and_under_a_model_that_they_follow(job, base, tmp_path):
    config = EngineWorker.Config(
        model=ModelSection(path=str(base), device="cpu"),
        engine=EngineSection(kind="torch", num_slots=4, max_len=64, stream_every=1),
        train=TrainSection(lora=LoraSection()),
    )
    saved = tmp_path / "saves" / "1"
    async with job(every=1) as (client, trainer, made, begin_again):
        await made.start(LLMProxy, "llm_proxy-1", LLMProxy.Config())
        await made.start(EngineWorker, "engine-1", config)
        await client.operate(BEGIN, taught(), OptimStep(0.1), Save(str(saved), optimizer=False), Follow())
        ready = await client.ask(PrepareSampler("saved", str(saved)))
        refused = await client.ask(PrepareSampler("other", str(tmp_path)))
        old, followed = await complete(client, "saved"), await complete(client, "m", version=1)
        await client.operate(taught(), OptimStep(0.1))
        newer, still = await complete(client, "m", version=2), await complete(client, "saved", version=0)

        assert ready == SamplerReady(0)
        assert isinstance(refused, SamplerRefused)
        assert all(isinstance(each, Completion) for each in (old, followed, newer, still))
        assert old.tokens.ids == followed.tokens.ids == still.tokens.ids
        assert newer.tokens.spans == (VersionSpan(2, 0, 4),)
        assert gap(trainer()._tuned, old, folder=saved) < 1e-4
        assert gap(trainer()._tuned, newer, model="m") < 1e-4 < gap(trainer()._tuned, old, model="m")

        await begin_again()  # a request for what is not published yet waits for it
        last, _ = await asyncio.gather(complete(client, "m", version=3), client.operate(taught(), OptimStep(0.1)))
        assert last.tokens.spans == (VersionSpan(3, 0, 4),)
        assert gap(trainer()._tuned, last, model="m") < 1e-4
        assert await client.ask(PrepareSampler("saved", str(saved))) == SamplerReady(0)
        await client.ask(WithdrawSampler("saved"))
        assert not isinstance(await client.ask(Generate(
            "late", "s", pack_i32(PROMPT), Sampling(4), WeightsNeed(0, False, "saved")), of="llm_proxy-1"), Completion)  # fmt: skip


async def test_tokens_are_scored_under_a_model_that_has_to_be_brought_back(job, tmp_path):
    tokens = pack_i32(PROMPT)
    async with job(every=1) as (client, trainer, _, begin_again):
        await client.operate(BEGIN, taught(), OptimStep(0.1))
        under, base = await client.ask(Score(tokens, model="m")), await client.ask(Score(tokens))
        await trainer()._written(trainer()._models["m"])
        await begin_again()

        assert await client.ask(Score(tokens, model="m")) == under != base
        assert await client.ask(Score(tokens, model="m", version=2)) == SamplerRefused("the model stands at version 1, not 2", behind=True)
        assert await client.ask(Score(tokens, model="x")) == SamplerRefused("there is no model x", behind=True)
