"""How the vLLM engine goes over to another vLLM, by a fake one; tests/contract/test_engine_capabilities.py has a real one."""

import asyncio
import sys
from collections import deque
from pathlib import Path
from types import SimpleNamespace

import pytest

from rubato.actors.config import ModelSection
from rubato.actors.engines import vllm_engine
from rubato.actors.engines.engine import EngineDead, EngineError, Work
from rubato.actors.engines.section import EngineSection
from rubato.actors.engines.vllm_engine import VllmEngine
from rubato.actors.messages.generation import Sampling, VersionSpan
from rubato.bus.message import unpack_i32
from tests.contract.engines import collect
from tests.unit.actors.engines.test_vllm_setup import image_of

NUM = 6


class Collector:
    """Outputs of one request, as the test has them sampled."""

    def __init__(self):
        self.outputs, self.there = deque(), asyncio.Event()

    def put(self, ids, finish_reason=None):
        completion = SimpleNamespace(token_ids=ids, logprobs=[{i: SimpleNamespace(logprob=-0.5)} for i in ids], finish_reason=finish_reason)
        self.outputs.append(SimpleNamespace(outputs=[completion], finished=finish_reason is not None))
        self.there.set()

    def get_nowait(self):
        return self.outputs.popleft() if self.outputs else None

    async def get(self):
        self.there.clear()
        await self.there.wait()
        return self.outputs.popleft()


class Llm:
    """What the engine asks of AsyncLLM."""

    def __init__(self, degree):
        self.degree, self.errored, self.output_handler = degree, False, None
        self.prompts, self.collectors, self.swapped = {}, {}, []
        self.engine_core = SimpleNamespace(outputs_queue=SimpleNamespace(empty=lambda: True), resources=SimpleNamespace())

    async def add_request(self, request_id, prompt, params):
        self.prompts[request_id] = (prompt["prompt_token_ids"], params.max_tokens)
        self.collectors[request_id] = Collector()
        return self.collectors[request_id]

    async def abort(self, ids):
        assert not self.errored
        for request_id in [ids] if isinstance(ids, str) else ids:
            if (collector := self.collectors.pop(request_id, None)) is not None:
                collector.put([], "abort")

    async def pause_generation(self, **_): ...

    async def resume_generation(self): ...

    async def start_weight_update(self): ...

    async def update_weights(self, request):
        self.swapped.append(Path(request.update_info["paths"][0]).read_bytes())

    async def finish_weight_update(self, version): ...

    async def reset_prefix_cache(self, *, reset_running_requests):
        return True

    def shutdown(self, timeout=None):
        assert not self.collectors, "requests are lost"
        self.errored = True


@pytest.fixture
def llms(monkeypatch):
    """All vLLMs that were ever launched; `hold` keeps the next one from starting, `fail` has it fail."""
    library = SimpleNamespace(SamplingParams=SimpleNamespace, RequestOutputKind=SimpleNamespace(DELTA=0))
    monkeypatch.setitem(sys.modules, "vllm.sampling_params", library)
    monkeypatch.setitem(sys.modules, "vllm.distributed.weight_transfer.base", SimpleNamespace(WeightTransferUpdateRequest=SimpleNamespace))
    platform = SimpleNamespace(is_cpu=lambda: True)
    monkeypatch.setitem(sys.modules, "vllm.platforms", SimpleNamespace(current_platform=platform))
    made = [Llm(1)]

    def launch(folder, model, section):
        if section.degree == 4:
            raise EngineError("no room for 4")
        made.append(Llm(section.degree))
        return made[-1]

    monkeypatch.setattr(vllm_engine, "launch", launch)
    return made


@pytest.fixture
def engine(llms):
    engine = VllmEngine(Path("/model"), ModelSection(), EngineSection(kind="vllm"))
    engine._llm, engine._vocab_size, engine._shapes, engine._heads = llms[0], 99, {"a": (1,)}, 4
    return engine


async def seated(llm, name="r"):
    while name not in llm.collectors:  # noqa: ASYNC110 - as a vLLM would see it
        await asyncio.sleep(0)
    return llm.collectors[name]


def work(name="r"):
    return Work(name, name, (1, 2, 3), Sampling(NUM))


async def test_which_version_a_token_is_of_is_what_vllm_says_of_it(engine, llms):
    async with asyncio.TaskGroup() as tasks:
        played = tasks.create_task(collect(engine, work()))
        collector = await seated(llms[0])
        collector.put([5, 6])
        await engine.update(4, image_of(a=[1.0]))
        collector.put([7, 8, 9, 10], "length")
        collector.outputs[-1].outputs[0].weight_versions = [
            SimpleNamespace(version="default", start=0), SimpleNamespace(version="4", start=3)
        ]  # fmt: skip

    assert played.result()[0].spans == (VersionSpan(0, 0, 3), VersionSpan(4, 3, 6))


async def test_requests_go_on_at_the_next_vllm_under_the_newest_weights(engine, llms):
    image = image_of(a=[1.0])
    await engine.update(5, image)
    async with asyncio.TaskGroup() as tasks:
        asked = tasks.create_task(collect(engine, work()))
        (await seated(llms[0])).put([10, 11])

        assert await engine.reconfigure(2) >= 0.0
        (await seated(llms[1])).put([12, 13, 14, 15], "length")

    tokens, reason = asked.result()
    assert (unpack_i32(tokens.ids), reason) == ([10, 11, 12, 13, 14, 15], "length")
    assert tokens.spans == (VersionSpan(5, 0, NUM),)
    assert llms[1].prompts["r"] == ([1, 2, 3, 10, 11], NUM - 2)
    assert llms[1].swapped == [bytes(image)]
    assert engine.load().degree == llms[1].degree == 2
    assert list(engine.switch_s) == ["export", "stop", "start", "weights"]
    assert engine.load().restart_s == engine.switch_s["stop"] + engine.switch_s["start"]


async def test_one_that_is_aborted_exported_or_comes_meanwhile_has_its_place(engine, llms, monkeypatch):
    go_on, launch, loop = asyncio.Event(), vllm_engine.launch, asyncio.get_running_loop()

    def held(*args):
        asyncio.run_coroutine_threadsafe(go_on.wait(), loop).result()
        return launch(*args)

    monkeypatch.setattr(vllm_engine, "launch", held)
    async with asyncio.TaskGroup() as tasks:
        asked = {name: tasks.create_task(collect(engine, work(name))) for name in ("aborted", "exported")}
        for name in asked:
            (await seated(llms[0], name)).put([10, 11])
        changing = tasks.create_task(engine.reconfigure(2))
        while not llms[0].errored:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        late = tasks.create_task(collect(engine, work("late")))
        await asyncio.sleep(0.01)
        assert (engine.load().running, engine.load().degree) == (3, 2)
        await engine.abort("aborted")
        exporting = tasks.create_task(engine.export("exported"))
        await asyncio.sleep(0)
        go_on.set()
        await changing
        (await seated(llms[1], "late")).put([20] * NUM, "length")

    assert (unpack_i32(asked["aborted"].result()[0].ids), asked["aborted"].result()[1]) == ([10, 11], "aborted")
    assert asked["exported"].result()[1] == "exported"
    assert unpack_i32(exporting.result().resumed.ids) == [10, 11]
    assert late.result()[1] == "length"
    assert list(llms[1].prompts) == ["late"]


async def test_who_sleeps_has_no_vllm_and_wakes_with_what_came_meanwhile(engine, llms):
    image = image_of(a=[2.0])
    async with asyncio.TaskGroup() as tasks:
        asked = {name: tasks.create_task(collect(engine, work(name))) for name in ("r", "aborted", "exported")}
        for name in asked:
            (await seated(llms[0], name)).put([10, 11])
        await asyncio.sleep(0)
        assert await engine.sleep() > 0.0
        assert await engine.sleep(2) == 0.0
        assert (len(llms), llms[0].errored, engine.load().asleep) == (1, True, True)

        late = tasks.create_task(collect(engine, work("late")))
        await engine.abort("aborted")
        moved = await engine.export("exported")
        await engine.suspend()
        await engine.resume()
        assert (await asked["aborted"])[1] == "aborted"
        await engine.update(5, image)
        assert await engine.reconfigure(2) == 0.0
        assert len(llms) == 1

        assert await engine.wake() >= 0.0
        assert await engine.wake() == 0.0
        (await seated(llms[1])).put([12, 13, 14, 15], "length")
        (await seated(llms[1], "late")).put([20] * NUM, "length")

    tokens, reason = asked["r"].result()
    assert (unpack_i32(tokens.ids), reason) == ([10, 11, 12, 13, 14, 15], "length")
    assert tokens.spans == (VersionSpan(0, 0, 2), VersionSpan(5, 2, NUM))
    assert unpack_i32(moved.resumed.ids) == [10, 11]
    assert (late.result()[0].spans, late.result()[1]) == ((VersionSpan(5, 0, NUM),), "length")
    assert list(llms[1].prompts) == ["r", "late"]
    assert (llms[1].degree, llms[1].swapped) == (2, [bytes(image)])
    assert not engine.load().asleep


async def test_one_that_is_stopped_asleep_ends_its_requests(engine, llms):
    async with asyncio.TaskGroup() as tasks:
        asked = tasks.create_task(collect(engine, work()))
        await seated(llms[0])
        await engine.sleep()
        await engine.stop()

    assert asked.result()[1] == "aborted"
    assert len(llms) == 1
    with pytest.raises(EngineDead):
        engine.load()


async def test_one_that_does_not_wake_ends_the_engine_and_its_requests(engine, llms):
    async def ends():
        with pytest.raises(EngineDead):
            await collect(engine, work())

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(ends())
        await seated(llms[0])
        await engine.sleep()
        await engine.reconfigure(4)

        with pytest.raises(EngineDead, match="did not come back with degree=4: no room for 4"):
            await engine.wake()


async def test_a_degree_that_can_not_be_changes_nothing(engine, llms):
    with pytest.raises(EngineError, match="degree=3 does not divide the 4 attention heads"):
        await engine.reconfigure(3)

    assert len(llms) == 1
    assert engine.load().degree == 1


async def test_one_that_does_not_start_ends_the_engine(engine, llms):
    with pytest.raises(EngineDead, match="did not come back with degree=4: no room for 4"):
        await engine.reconfigure(4)

    with pytest.raises(EngineDead):
        engine.load()
