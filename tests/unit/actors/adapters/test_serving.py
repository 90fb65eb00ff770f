"""Adapters by name through the actors: published by the trainer's transport, held by an engine, asked for by way of the proxy."""

import asyncio
from contextlib import asynccontextmanager

import pytest

from rubato.actors.adapters.bank import AdapterBank
from rubato.actors.adapters.publishing import AdapterPublisher
from rubato.actors.adapters.shapes import AdapterError
from rubato.actors.adapters.torch_engine import AdaptedTorchEngine
from rubato.actors.config import LoraSection, ModelSection, TrainSection
from rubato.actors.engines.section import EngineSection
from rubato.actors.engines.worker import EngineWorker
from rubato.actors.messages.generation import Aborted, Completion, Generate, Inspect, Sampling, VersionSpan
from rubato.actors.proxy.proxy import LLMProxy
from rubato.actors.weights.transport import BlobSender
from rubato.bus.link import Identity
from rubato.bus.memory import MemoryNetwork, MemoryTransport
from rubato.bus.message import pack_i32, unpack_f32, unpack_i32
from rubato.planning.engine_info import WeightsId, WeightsNeed
from rubato.runtime.actor import Actor, RunInfo
from rubato.runtime.config import ActorConfig
from rubato.runtime.kernel import Kernel
from rubato.runtime.memory import MemoryBlobStore, MemoryStore
from rubato.runtime.observe.log import logger
from tests.models import write_model
from tests.unit.actors.adapters.conftest import bank_over, taught

PROMPT = (5, 6, 7, 8)
CLOSE = 1e-4


class OnePlace(AdaptedTorchEngine):
    """Holds one adapter beside that of the run."""

    most_adapters = 1


class Tenant(Actor):
    """Trains adapters, publishes them, and asks for completions."""

    role = "trainer"

    def __init__(self, config, kernel):
        super().__init__(config, kernel)
        self.publisher = AdapterPublisher(self, BlobSender(self), term=1)

    async def publish(self, bank, *names):
        for name in names:
            await self.publisher.publish(name, bank.version(name), bank.source(name))

    async def complete(self, request_id, adapter, *, version=0, exact=False, num=6, of="llm_proxy-1"):
        need = WeightsNeed(version, exact, adapter)
        request = Generate(request_id, "session", pack_i32(PROMPT), Sampling(num, seed=3), need)
        return await self.ref(of).ask(request, timeout=60.0)


class Job:
    """A proxy, an engine and a tenant."""

    def __init__(self, tasks, folder):
        self._tasks, self._folder = tasks, folder
        self._network, self._store, self.blobs = MemoryNetwork(), MemoryStore(), MemoryBlobStore()
        self._serving = []

    async def start(self, actor_class, name, config):
        incarnation = await self._store.increment("incarnation")
        kernel = Kernel(
            actor_class, config, name=name, incarnation=incarnation, run=RunInfo("test", self._folder, 7, 1),
            transport=MemoryTransport(Identity("test", name, incarnation), self._network),
            store=self._store, blobs=self.blobs, log=logger("rubato.test"),
        )  # fmt: skip
        actor = kernel.build()
        self._serving.append(self._tasks.create_task(kernel.serve(), name=name))
        await kernel.ready.wait()
        return actor

    def stop(self):
        for task in self._serving:
            task.cancel()


@pytest.fixture
def job(base, tmp_path):
    @asynccontextmanager
    async def run(kind="torch"):
        config = EngineWorker.Config(
            model=ModelSection(path=str(base), device="cpu"),
            engine=EngineSection(kind=kind, num_slots=8, max_len=256, stream_every=1),
            train=TrainSection(lora=LoraSection()),
        )
        async with asyncio.TaskGroup() as tasks:
            made = Job(tasks, tmp_path)
            tenant = await made.start(Tenant, "trainer-1", ActorConfig())
            await made.start(LLMProxy, "llm_proxy-1", LLMProxy.Config())
            await made.start(EngineWorker, "engine-1", config)
            yield tenant, made
            made.stop()

    return run


@pytest.fixture(scope="module")
def bank(base, tmp_path_factory, trajectory):
    """Two adapters of other ranks and targets that have learned something, and so differ."""
    found = bank_over(base, tmp_path_factory.mktemp("spilled"))
    for name in ("a", "b"):
        taught(found, name, trajectory)
    return found


def gap(bank: AdapterBank, name, reply):
    """Of the reply's log-probs to those of the adapter in the bank."""
    ids = unpack_i32(reply.tokens.ids)
    theirs = bank.logprobs(name, [[*PROMPT, *ids]])[0][len(PROMPT) :]
    return max(abs(a - b) for a, b in zip(unpack_f32(reply.tokens.logprobs), theirs, strict=True))


async def test_requests_are_answered_by_the_adapter_that_they_name(job, bank, trajectory):
    async with job() as (tenant, _):
        await tenant.publish(bank, "a", "b")

        replies = await asyncio.gather(*(tenant.complete(f"r{i}", ("a", "b")[i % 2]) for i in range(4)), tenant.complete("base", ""))
        status = await tenant.ref("engine-1").ask(Inspect(), timeout=10.0)

    for reply, name, other in zip(replies[:4], "abab", "baba", strict=True):
        assert gap(bank, name, reply) < CLOSE < gap(bank, other, reply)
        assert reply.tokens.spans == (VersionSpan(bank.version(name), 0, 6),)
    assert replies[4].tokens.spans == (VersionSpan(0, 0, 6),)
    assert set(status.info.holds) == {WeightsId(0, ""), *(WeightsId(bank.version(name), name) for name in "ab")}


async def test_a_newer_version_is_swapped_in_under_a_request_and_waited_for_by_one_that_needs_it(job, bank, trajectory):
    async with job() as (tenant, _):
        await tenant.publish(bank, "a", "b")
        await tenant.complete("r0", "a")
        waiting = tenant.spawn(tenant.complete("r1", "a", version=bank.version("a") + 1), name="r1")
        await tenant.complete("r2", "a")
        assert not waiting.done()
        taught(bank, "a", trajectory)

        await tenant.publish(bank, "a")
        reply, other = await waiting, await tenant.complete("r3", "b")

    assert reply.tokens.spans == (VersionSpan(bank.version("a"), 0, 6),)
    assert gap(bank, "a", reply) < CLOSE
    assert other.tokens.spans == (VersionSpan(bank.version("b"), 0, 6),)


async def test_an_engine_that_is_full_drops_what_no_request_is_under_and_brings_it_back(job, bank):
    async with job(f"{__name__}:OnePlace") as (tenant, _):
        await tenant.publish(bank, "a", "b")

        replies = [await tenant.complete(f"r{i}", name) for i, name in enumerate("abab")]
        status = await tenant.ref("engine-1").ask(Inspect(), timeout=10.0)
        crowd = await asyncio.gather(*(tenant.complete(f"c{i}", "ab"[i % 2], num=40) for i in range(4)))

    assert [gap(bank, name, reply) < CLOSE for reply, name in zip(replies, "abab", strict=True)] == [True] * 4
    assert status.info.holds == (WeightsId(0, ""), WeightsId(bank.version("b"), "b"))
    assert [gap(bank, name, reply) < CLOSE for reply, name in zip(crowd, "abab", strict=True)] == [True] * 4


async def test_what_is_withdrawn_ends_its_requests_and_its_name_is_free(job, bank):
    async with job() as (tenant, made):
        await tenant.publish(bank, "a", "b")
        running = [tenant.spawn(tenant.complete(name, name, num=200), name=name) for name in ("a", "b")]
        await tenant.complete("r0", "a")

        await tenant.publisher.withdraw("a")
        aborted = await running[0]
        left = await made.blobs.newest("weights.a")
        refused = await tenant.complete("r1", "a")
        await tenant.publisher.publish("a", 0, bank.source("b"))
        again, whole = await tenant.complete("r2", "a"), await running[1]

    assert isinstance(aborted, Aborted)
    assert refused.reason == "there is no adapter a: none of that name is published"
    assert (aborted.reason, left) == ("the adapter a was withdrawn", None)
    assert (again.tokens.spans, gap(bank, "b", again) < CLOSE) == ((VersionSpan(0, 0, 6),), True)
    assert isinstance(whole, Completion)


async def test_what_can_be_no_adapter_is_refused_with_a_sentence_and_the_engine_goes_on(job, bank, adapter_image, tmp_path):
    foreign = adapter_image(1, folder=write_model(tmp_path / "other", seed=1))
    async with job() as (tenant, made):
        await tenant.publish(bank, "a")
        await made.blobs.put("weights.foreign", 1, 1, [foreign])

        for name, exact, sentence in (
            ("nobody", False, "there is no adapter nobody: none of that name is published"),
            ("foreign", False, "is an adapter of another base model"),
            ("x" * 129, False, "is no name of an adapter"),
            ("a", True, "is for version 1 of the adapter a alone"),
        ):
            refused = await tenant.complete(f"{name[:9]}-{exact}", name, version=1, exact=exact, of="engine-1")
            assert isinstance(refused, Aborted)
            assert sentence in refused.reason
        with pytest.raises(AdapterError, match="is no name of an adapter"):
            await tenant.publisher.publish("a.delta", 1, bank.source("a"))
        reply = await tenant.complete("r", "a")

    assert gap(bank, "a", reply) < CLOSE
