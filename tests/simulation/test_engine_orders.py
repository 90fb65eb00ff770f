"""Engines that sleep, wake and change their degree under a real proxy: requests keep their place, and new ones go where somebody is awake."""

import asyncio

import pytest

from rubato.actors.engines.engine import ENGINES, EngineDead
from rubato.actors.messages.engines import Reconfigure, SleepEngine, WakeEngine
from rubato.actors.messages.generation import Generate
from rubato.actors.messages.moves import NotMoved
from rubato.actors.scripted.engine import ScriptedEngine
from rubato.bus.errors import AskFailed
from tests.simulation.test_moves import NUM, REQUEST, bench, unmoved
from tests.virtual import virtual


def another(name: str, session: str) -> Generate:
    return Generate(name, session, REQUEST.prompt, REQUEST.sampling)


@virtual
async def test_a_request_on_an_engine_that_sleeps_waits_there_and_new_ones_go_to_the_other(tmp_path):
    async with bench(tmp_path) as cluster:
        expected = await unmoved(cluster)
        asked = cluster.ask(REQUEST)
        await cluster.sampled(NUM + 5)
        source = cluster.source
        other = "engine-1" if source == "engine-2" else "engine-2"

        assert (await cluster.asker.ref(source).ask(SleepEngine(), timeout=5.0)).info.asleep
        others = [await cluster.ask(another(f"r{i}", session)) for i, session in enumerate(["s", "t", "u"])]
        moved = await cluster.move(source, "r")
        waited = not asked.done()
        await cluster.asker.ref(source).ask(WakeEngine(), timeout=5.0)
        completion = await asked

    assert {completion.engine for completion in others} == {other}
    assert isinstance(moved, NotMoved)
    assert waited
    assert (completion.engine, completion.tokens) == (source, expected.tokens)


@virtual
async def test_where_all_sleep_requests_wait_on_an_engine_and_none_is_moved_to_one(tmp_path):
    async with bench(tmp_path) as cluster:
        for name in ("engine-1", "engine-2"):
            await cluster.asker.ref(name).ask(SleepEngine(level=2), timeout=5.0)
        asked = cluster.ask(REQUEST)
        await asyncio.sleep(1.0)
        source, moved = cluster.source, await cluster.move()

        await cluster.asker.ref(source).ask(WakeEngine(), timeout=5.0)

        assert (await asked).engine == source
        assert moved.why == f"{'engine-1' if source == 'engine-2' else 'engine-2'} is asleep"


@virtual
async def test_a_proxy_that_restarts_learns_who_sleeps_and_an_engine_that_restarts_is_awake(tmp_path):
    async with bench(tmp_path) as cluster:
        await cluster.asker.ref("engine-1").ask(SleepEngine(), timeout=5.0)
        await cluster.kill("llm_proxy-1")
        await cluster.proxy()
        first = [await cluster.ask(another(f"r{i}", f"s{i}")) for i in range(4)]

        await cluster.kill("engine-1")
        await cluster.engine("engine-1")
        await asyncio.sleep(1.0)
        asked = [cluster.ask(another(f"q{i}", f"s{i}")) for i in range(4)]
        second = [await task for task in asked]

    assert {completion.engine for completion in first} == {"engine-2"}
    assert {completion.engine for completion in second} == {"engine-1", "engine-2"}


class Growing(ScriptedEngine):
    """Of as many GPUs as it is told."""

    degree = 1

    async def reconfigure(self, degree):
        self.degree = degree
        return 4.52

    def load(self):
        return super().load()._replace(degree=self.degree)


@virtual
async def test_the_degree_stands_in_what_the_proxy_knows(tmp_path, monkeypatch):
    monkeypatch.setitem(ENGINES, "scripted", f"{__name__}:Growing")
    async with bench(tmp_path) as cluster:
        changed = await cluster.asker.ref("engine-2").ask(Reconfigure(4, 1), timeout=5.0)
        seats = cluster.actors["llm_proxy-1"].placement.seats
        degrees = [seats["engine-1"].info.degree, seats["engine-2"].info.degree]

    assert (changed.seconds, changed.info.degree) == (4.52, 4)
    assert degrees == [1, 4]


class Broken(ScriptedEngine):
    """Does not come back from another degree."""

    broken = False

    async def reconfigure(self, degree):
        self.broken = True
        return self.load().version

    def load(self):
        if self.broken:
            raise EngineDead("no room on the GPU")
        return super().load()


@virtual
async def test_an_engine_that_does_not_come_back_ends_its_worker(tmp_path, monkeypatch):
    monkeypatch.setitem(ENGINES, "scripted", f"{__name__}:Broken")

    async def play():
        async with bench(tmp_path) as cluster:
            with pytest.raises(AskFailed, match="no room on the GPU"):
                await cluster.asker.ref("engine-1").ask(Reconfigure(4, 1), timeout=5.0)
            await asyncio.sleep(1.0)

    with pytest.raises(ExceptionGroup) as told:
        await play()

    assert "no room on the GPU" in repr(told.value.exceptions)
