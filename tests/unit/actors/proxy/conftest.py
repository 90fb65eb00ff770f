"""Engines that answer when the test says so."""

import asyncio
from types import SimpleNamespace

import numpy as np
import pytest

from rubato.actors.config import ProxySection
from rubato.actors.messages.affinity import Measure, StepsMeasured
from rubato.actors.messages.generation import (
    Abort,
    Aborted,
    Completion,
    EngineStatus,
    Generate,
    HandedBack,
    InfoChanged,
    Inspect,
    Resume,
    Route,
    Sampling,
    Suspend,
    Tokens,
    TokensSampled,
    VersionSpan,
)
from rubato.actors.proxy.proxy import LLMProxy
from rubato.bus.message import Ack
from rubato.planning.engine_info import EngineInfo, WeightsId, WeightsNeed
from rubato.planning.step_sums import StepSums


def tokens(ids, version=0, start=0):
    return Tokens(
        np.array(ids, "<i4").tobytes(),
        np.full(len(ids), -0.5, "<f4").tobytes(),
        (VersionSpan(version, start, start + len(ids)),) if ids else (),
    )


def ids_of(value):
    return np.frombuffer(value.tokens.ids, "<i4").tolist()


class FakeEngine:
    def __init__(self, name, num_slots, version):
        self.name, self.num_slots, self.version = name, num_slots, version
        self.generates: list[Generate] = []
        self.open: dict[str, asyncio.Future] = {}
        self.cancelled: list[str] = []
        self.aborts: list[str] = []
        self.running: tuple[str, ...] = ()
        self.finished: tuple[str, ...] = ()
        self.suspended = False
        self.steps = tuple(StepSums().values)
        self.measured = 0

    async def __call__(self, request):
        match request:
            case Inspect():
                info = EngineInfo(self.name, self.num_slots, (WeightsId(self.version),), self.suspended)
                return EngineStatus(info, self.running, self.finished)
            case Measure():
                self.measured += 1
                return StepsMeasured(self.name, self.steps)
            case Generate():
                return await self._generate(request)
            case Abort():
                self.aborts.append(request.request_id)
                if request.request_id in self.open:
                    self.end(request.request_id, reason=request.reason)
            case Suspend() | Resume():
                self.suspended = isinstance(request, Suspend)
        return Ack()

    async def _generate(self, request):
        self.generates.append(request)
        future = self.open[request.request_id] = asyncio.get_running_loop().create_future()
        try:
            return await future
        except asyncio.CancelledError:
            self.cancelled.append(request.request_id)
            raise
        finally:
            self.open.pop(request.request_id, None)

    @property
    def asked(self):
        return [request.request_id for request in self.generates]

    def complete(self, request_id, ids, version=None):
        """All of the completion's tokens after the resumed ones."""
        self.open[request_id].set_result(Completion(request_id, self._all(request_id, ids, version), "stop", self.name))

    def end(self, request_id, ids=(), reason=""):
        """Early: handed back where no reason is given."""
        sampled = self._all(request_id, ids, None)
        ended = Aborted(request_id, sampled, reason) if reason else HandedBack(request_id, sampled)
        self.open[request_id].set_result(ended)

    def _all(self, request_id, ids, version):
        resumed = next(r.resumed for r in reversed(self.generates) if r.request_id == request_id)
        new = tokens(list(ids), self.version if version is None else version, len(resumed.ids) // 4)
        return Tokens(resumed.ids + new.ids, resumed.logprobs + new.logprobs, resumed.spans + new.spans)


class Scene:
    """One proxy, its engines and the askers."""

    def __init__(self, context, section, affinity):
        self.context = context
        self.proxy = LLMProxy(LLMProxy.Config(proxy=section, affinity=affinity), context)
        self.engines: dict[str, FakeEngine] = {}

    def engine(self, name, num_slots=4, version=0):
        self.engines[name] = self.context.actors[name] = engine = FakeEngine(name, num_slots, version)
        return engine

    async def joins(self, name, hardware="", **kwargs):
        engine = self.engine(name, **kwargs)
        self.context.records[name] = SimpleNamespace(hardware=hardware)
        await self.proxy.on_peers((name,), ())
        await self.settle()
        return engine

    async def leaves(self, name):
        del self.context.actors[name]
        await self.proxy.on_peers((), (name,))

    async def settle(self):
        """Let everything run that can run without time passing."""
        for _ in range(20):
            await asyncio.sleep(0)

    async def ask(self, request_id, session="", min_version=0, max_new_tokens=8, resumed=None, exact=False, task="", prompt=3, adapter=""):
        """An asker's future."""
        request = Generate(
            request_id,
            session or request_id,
            b"\1\0\0\0" * prompt,
            Sampling(max_new_tokens, stop_token_ids=(99,)),
            WeightsNeed(min_version, exact, adapter),
            resumed or Tokens(),
            Route(task),
        )
        asking = self.proxy.generate(request)
        await self.settle()
        return asking

    async def sampled(self, name, request_id, ids, version=0, start=0, adapter=""):
        names = {request_id: adapter} if adapter else {}
        await self.proxy.tokens_sampled(TokensSampled(name, ((request_id, tokens(ids, version, start)),), names))


@pytest.fixture
def scene(on_stage):
    """`scene(play, **section)`: run `await play(scene)` on a jumping loop."""

    def run(play, affinity=(), **section):
        async def main(context):
            await play(Scene(context, ProxySection(**section), affinity or {}))

        on_stage(main, name="llm_proxy-1")

    return run


@pytest.fixture(name="ids_of")
def ids_of_fixture():
    return ids_of


@pytest.fixture(name="tokens")
def tokens_fixture():
    return tokens


@pytest.fixture(name="changed")
def changed_fixture():
    """`await changed(stage, name, version=…, pinned=…, asleep=…)`: the engine tells the proxy how it is now."""

    async def changed(stage, name, version=0, **told):
        info = EngineInfo(name, stage.engines[name].num_slots, (WeightsId(version),), **told)
        await stage.proxy.engine_changed(InfoChanged(info))

    return changed
