"""LLMProxy, engines and the fabric as kernels on the memory transport: deaths, restarts and drains."""

import asyncio
from contextlib import asynccontextmanager

import numpy as np
import pytest

from rubato.actors.engines.section import EngineSection, ScriptedSection
from rubato.actors.engines.worker import EngineWorker
from rubato.actors.fabric.controller import FabricController
from rubato.actors.fabric.emulated import EmulatedSwitch
from rubato.actors.messages.fabric import InspectFabric
from rubato.actors.messages.generation import (
    GENERATION,
    Abort,
    Completion,
    EngineStatus,
    Generate,
    GenerateReply,
    HandedBack,
    Inspect,
    Sampling,
    Tokens,
    TokensSampled,
    VersionSpan,
)
from rubato.actors.messages.phases import PhaseIntent
from rubato.actors.proxy.proxy import LLMProxy
from rubato.bus.link import Identity
from rubato.bus.memory import MemoryTransport
from rubato.bus.message import Ack
from rubato.planning.engine_info import EngineInfo
from rubato.runtime.actor import Actor, RunInfo, handler
from rubato.runtime.config import ActorConfig
from rubato.runtime.kernel import Kernel
from rubato.runtime.memory import MemoryStore
from rubato.runtime.observe.log import logger
from rubato.sim.simtest.network import FaultPlan, FaultyNetwork
from tests.virtual import virtual


class SteppedEngine(Actor):
    """Samples token n as the n-th of each completion, a few per tick, and reports each tick; version 0."""

    role = "engine"
    provides = frozenset({GENERATION})
    stalls_at = -1

    def __init__(self, config, kernel):
        super().__init__(config, kernel)
        self.generated: list[Generate] = []
        self.running: dict[str, asyncio.Event] = {}
        self.answered = asyncio.Condition()
        self.handed_back = 0

    @handler
    async def inspect(self, request: Inspect) -> EngineStatus:
        return EngineStatus(EngineInfo(self.name, 8), tuple(self.running), ())

    @handler
    async def abort(self, request: Abort) -> Ack:
        return Ack()

    @handler(concurrency=64)
    async def generate(self, request: Generate) -> GenerateReply:
        self.generated.append(request)
        drained = self.running[request.request_id] = asyncio.Event()
        num = len(request.resumed.ids) // 4
        try:
            while num < request.sampling.max_new_tokens and not drained.is_set():
                await asyncio.sleep(0.002)
                if num == self.stalls_at:
                    await drained.wait()
                    break
                more = _tokens(num, num + 1)
                num += 1
                await self.ref("llm_proxy").tell(TokensSampled(self.name, ((request.request_id, more),)))
        finally:
            del self.running[request.request_id]
            async with self.answered:
                self.answered.notify_all()
        if drained.is_set():
            self.handed_back += num
            return HandedBack(request.request_id, _tokens(0, num))
        return Completion(request.request_id, _tokens(0, num), "length", self.name)

    async def on_drain(self):
        for drained in self.running.values():
            drained.set()
        async with self.answered:
            await self.answered.wait_for(lambda: not self.running)


class StallingEngine(SteppedEngine):
    """Stops after ten tokens until it is drained."""

    stalls_at = 10


class NoBlobs:
    """No weights were published."""

    async def newest(self, name):
        return None


class Asker(Actor):
    role = "env_manager"


def _tokens(start, end):
    return Tokens(np.arange(start, end, dtype="<i4").tobytes(), np.zeros(end - start, "<f4").tobytes(), (VersionSpan(0, start, end),))


class Cluster:
    def __init__(self, tasks, folder):
        self.tasks, self.folder = tasks, folder
        self.network, self.store = FaultyNetwork(FaultPlan(seed=1)), MemoryStore()
        self.serving, self.actors = {}, {}

    async def start(self, actor_class, name, pool="", **sections):
        incarnation = await self.store.increment("incarnation")
        kernel = Kernel(
            actor_class,
            (actor_class.Config or ActorConfig)(**sections),
            name=name,
            incarnation=incarnation,
            run=RunInfo("test", self.folder, 7, 1),
            transport=self.transport(Identity("test", name, incarnation)),
            store=self.store,
            blobs=NoBlobs(),
            log=logger("rubato.test"),
            pool=pool,
        )
        self.actors[name] = kernel.build()
        self.serving[name] = kernel, self.tasks.create_task(kernel.serve(), name=name)
        await kernel.ready.wait()
        return kernel

    def transport(self, identity):
        return MemoryTransport(identity, self.network)

    async def kill(self, name):
        """As SIGKILL would: nothing is flushed and the registry is not told."""
        kernel, task = self.serving.pop(name)
        kernel.transport.die()
        task.cancel()
        await asyncio.wait([task])

    async def drain(self, name):
        kernel, task = self.serving.pop(name)
        kernel.stop()
        await task

    async def until(self, condition):
        async with asyncio.timeout(10):
            while not condition():  # noqa: ASYNC110 - other actors' state has no event
                await asyncio.sleep(0.001)


@asynccontextmanager
async def cluster(folder):
    async with asyncio.TaskGroup() as tasks:
        made = Cluster(tasks, folder)
        yield made
        for _, task in made.serving.values():
            task.cancel()


@pytest.fixture
def generate():
    def make(i, num_tokens=30):
        return Generate(f"t{i}.0.0", f"t{i}", b"\0" * 40, Sampling(num_tokens))

    return make


def _ids(completion):
    return np.frombuffer(completion.tokens.ids, "<i4").tolist()


@virtual
async def test_completions_survive_the_death_of_their_engine_without_a_lost_or_doubled_token(tmp_path, generate):
    async with cluster(tmp_path) as made:
        await made.start(LLMProxy, "llm_proxy-1")
        await made.start(SteppedEngine, "engine-1")
        await made.start(SteppedEngine, "engine-2")
        asker = await made.start(Asker, "env_manager-1")
        proxy = asker.ref("llm_proxy")
        asking = [made.tasks.create_task(proxy.ask(generate(i), timeout=20)) for i in range(12)]
        victim = made.actors["engine-1"]
        await made.until(lambda: len(victim.running) > 2 and sum(map(bool, victim.generated)) > 2)
        await asyncio.sleep(0.02)

        await made.kill("engine-1")
        completions = [await task for task in asking]

        assert all(_ids(c) == list(range(30)) for c in completions)
        assert all(c.tokens.spans == (VersionSpan(0, 0, 30),) for c in completions)
        assert any(g.resumed.ids for g in made.actors["engine-2"].generated)


@virtual
async def test_a_drained_engine_loses_nothing(tmp_path, generate):
    async with cluster(tmp_path) as made:
        await made.start(LLMProxy, "llm_proxy-1")
        await made.start(StallingEngine, "engine-1")
        asker = await made.start(Asker, "env_manager-1")
        proxy = asker.ref("llm_proxy")
        asking = [made.tasks.create_task(proxy.ask(generate(i), timeout=20)) for i in range(6)]
        await made.until(lambda: len(made.actors["engine-1"].running) == 6)
        await made.start(SteppedEngine, "engine-2")

        victim = made.actors["engine-1"]
        await made.drain("engine-1")
        completions = [await task for task in asking]

        assert all(_ids(c) == list(range(30)) for c in completions)
        resumed = made.actors["engine-2"].generated
        assert len(resumed) == 6
        assert sum(len(g.resumed.ids) // 4 for g in resumed) == victim.handed_back


@virtual
async def test_requests_survive_the_death_of_the_proxy_on_the_engine_that_runs_them(tmp_path, generate):
    async with cluster(tmp_path) as made:
        await made.start(LLMProxy, "llm_proxy-1")
        await made.start(SteppedEngine, "engine-1")
        asker = await made.start(Asker, "env_manager-1")
        proxy = asker.ref("llm_proxy")
        asking = [made.tasks.create_task(proxy.ask(generate(i), timeout=20)) for i in range(6)]
        await made.until(lambda: len(made.actors["engine-1"].running) == 6)

        await made.kill("llm_proxy-1")
        await made.start(LLMProxy, "llm_proxy-1")

        completions = [await task for task in asking]
        assert all(_ids(c) == list(range(30)) for c in completions)
        assert made.actors["llm_proxy-1"].metrics.snapshot().get("proxy/moved", 0) == 0


@virtual
async def test_the_controller_drives_a_switch_that_is_an_actor_and_survives_its_restart(tmp_path):
    async with cluster(tmp_path) as made:
        await made.start(EmulatedSwitch, "optical_switch-1")
        await made.start(FabricController, "fabric_controller-1")
        asker = await made.start(Asker, "env_manager-1")
        fabric = asker.ref("fabric_controller")
        controller = made.actors["fabric_controller-1"]
        await made.until(lambda: controller.directory.ready("optical_switch") and asker.directory.ready("fabric_controller"))

        await fabric.tell(PhaseIntent("rollout", 0, 0.0, (("llm_proxy-1", "engine-1", 100),)))
        await made.until(lambda: controller.metrics.snapshot().get("fabric/reconfigurations") == 1)
        await made.kill("optical_switch-1")
        await made.start(EmulatedSwitch, "optical_switch-1")
        await made.until(lambda: controller.metrics.snapshot().get("fabric/reconfigurations") == 2)
        report = await fabric.ask(InspectFabric(), timeout=5)

        assert report.phase == "rollout"
        assert len(report.circuits) == 8


async def _sample_with_workers(folder, *, death):
    """Tokens of ten greedy requests over two scripted workers, one killed half-way or not; and how many requests moved."""
    async with cluster(folder) as made:
        scripted = ScriptedSection(token_s=0.002, stop_share=0.0)
        section = EngineSection(kind="scripted", num_slots=8, stream_every=2, scripted=scripted)
        await made.start(LLMProxy, "llm_proxy-1")
        for i in (1, 2):
            await made.start(EngineWorker, f"engine-{i}", engine=section)
        proxy = (await made.start(Asker, "env_manager-1")).ref("llm_proxy")
        greedy = Sampling(40, temperature=0.0)
        requests = [Generate(f"t{i}", f"t{i}", i.to_bytes(4, "little") * 5, greedy) for i in range(10)]
        asking = [made.tasks.create_task(proxy.ask(request, timeout=20)) for request in requests]
        await made.until(lambda: made.actors["engine-1"].metrics.snapshot().get("engine/tokens", 0) > 40)
        if death:
            await made.kill("engine-1")
        completions = [await task for task in asking]
        assert all(c.tokens.spans == (VersionSpan(0, 0, 40),) for c in completions)
        return [_ids(c) for c in completions], made.actors["llm_proxy-1"].metrics.snapshot().get("proxy/moved", 0)


@virtual
async def test_with_real_workers_a_death_moves_requests_and_changes_no_token(tmp_path):
    undisturbed, moved_without = await _sample_with_workers(tmp_path, death=False)

    disturbed, moved = await _sample_with_workers(tmp_path, death=True)

    assert disturbed == undisturbed
    assert (moved_without, moved > 0) == (0, True)
