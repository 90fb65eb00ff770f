"""The scripted engine at the pace of modelled hardware, in virtual time: what takes how long, and what nothing waits for."""

import asyncio
from contextlib import aclosing

import pytest

from rubato.actors.config import ModelSection
from rubato.actors.engines.engine import EngineError, Work
from rubato.actors.engines.pace import EnginePace, deployment_of
from rubato.actors.engines.scheduler import Row
from rubato.actors.engines.section import EngineSection, PaceSection
from rubato.actors.messages.generation import Sampling
from rubato.actors.scripted.paced import scripted_engine
from rubato.planning.roofline import Roofline
from rubato.sim.engine_model import ModelledEngine
from rubato.sim.timeline import Timeline
from tests.models import weights_image, write_model
from tests.virtual import virtual

H20 = {"hardware": "h20", "model": "qwen3-8b"}


def roofline(**changes) -> Roofline:
    return Roofline(deployment_of(PaceSection(**(H20 | changes))))


async def started(folder, num_slots=8, stream=16, **changes):
    sizes = {"num_slots": num_slots, "max_len": 4096, "max_batch_tokens": 8192, "stream_every": stream}
    section = EngineSection(kind="scripted", pace=PaceSection(**(H20 | changes)), **sizes)
    engine = scripted_engine(folder, ModelSection(), section)
    await engine.start()
    return engine


async def ask(engine, name: str, prompt: int, tokens: int, session="") -> float:
    """When its last token came."""
    async with aclosing(engine.generate(Work(name, session, (1,) * prompt, Sampling(tokens)))) as chunks:
        async for _ in chunks:
            pass
    return asyncio.get_running_loop().time()


def now() -> float:
    return asyncio.get_running_loop().time()


@pytest.mark.parametrize("scale", [1.0, 0.25])
@virtual
async def test_a_request_takes_its_prefill_and_a_decode_step_for_every_further_token(tmp_path, scale):
    engine, began, model = await started(tmp_path, scale=scale), now(), roofline()

    ended = await ask(engine, "a", 1000, 5)

    decode_s = sum(model.step_s(1, 1000 + i) for i in range(4))
    assert ended - began == pytest.approx(scale * (model.prefill_s(1000) + decode_s))
    assert engine.load().gauges["paced/outlasted_frac"] == 0


@virtual
async def test_a_batch_decodes_in_the_steps_of_its_size(tmp_path):
    engine, model = await started(tmp_path), roofline()
    await engine.suspend()
    async with asyncio.TaskGroup() as tasks:
        asked = [tasks.create_task(ask(engine, f"r{i}", 500, 3)) for i in range(4)]
        await asyncio.sleep(1.0)
        began = now()
        await engine.resume()

    decode_s = model.step_s(4, 4 * 500) + model.step_s(4, 4 * 501)
    assert [t.result() - began for t in asked] == 4 * [pytest.approx(4 * model.prefill_s(500) + decode_s)]


@virtual
async def test_more_gpus_take_less_time_and_a_class_of_more_compute_prefills_faster(tmp_path):
    async def takes(**changes) -> float:
        began = now()
        return await ask(await started(tmp_path, **changes), "a", 2000, 2) - began

    one, four, h800 = await takes(), await takes(degree=4), await takes(hardware="h800")
    assert four < one
    assert h800 < one / 2


@virtual
async def test_a_later_turn_prefills_what_is_new_and_new_weights_all_of_it_again(tmp_path):
    engine, model = await started(tmp_path), roofline()
    first = Work("a", "s", (1,) * 1000, Sampling(1))
    tokens = [chunk.tokens async for chunk in engine.generate(first)]
    assert len(tokens[0].ids) == 4

    began = now()
    turn_s = await ask(engine, "b", 1100, 1, session="s") - began
    await engine.update(1, weights_image(write_model(tmp_path / "model")))
    began = now()
    again_s = await ask(engine, "c", 1200, 1, session="s") - began

    assert turn_s == pytest.approx(model.prefill_s(100, 1000))
    assert again_s == pytest.approx(model.prefill_s(1200))


@virtual
async def test_a_swap_waits_for_the_step_and_lasts_what_loading_the_class_model_takes(tmp_path):
    image = weights_image(write_model(tmp_path / "model"))
    engine, model = await started(tmp_path), roofline()
    began = now()
    async with asyncio.TaskGroup() as tasks:
        asked = tasks.create_task(ask(engine, "a", 1000, 2))
        await asyncio.sleep(0.001)
        pause_s = await engine.update(1, image)
        swapped = now()

    assert pause_s == pytest.approx(model.swap_s())
    assert swapped - began == pytest.approx(model.prefill_s(1000) + model.swap_s())
    # its cache is of the old weights: what it holds is prefilled again
    assert asked.result() - swapped == pytest.approx(model.prefill_s(1001))


async def first_of(engine, prompt: int):
    """The iterator of a request that was prefilled."""
    chunks = engine.generate(Work("a", "", (1,) * prompt, Sampling(400)))
    while not (await anext(chunks)).tokens.ids:
        pass
    return chunks


async def takes(awaitable) -> float:
    began = now()
    await awaitable
    return now() - began


@virtual
async def test_a_move_lasts_what_the_cache_takes_over_the_nics_and_saves_the_prefill(tmp_path):
    source, target, model = await started(tmp_path, stream=1), await started(tmp_path, stream=1), roofline()
    chunks = await first_of(source, 1000)
    await source.suspend()  # in the middle of no step
    began = now()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(anext(chunks))
        work = await source.export("a", with_cache=True)
    exported_s, held = now() - began, work.cache.num_tokens
    began = now()
    await anext(target.generate(work))
    with_cache_s, began = now() - began, now()
    await anext(target.generate(work._replace(request_id="b", cache=None)))

    assert held == 1000 + len(work.resumed.ids) // 4 - 1
    assert exported_s == pytest.approx(model.kv_move_s(held))
    assert with_cache_s == pytest.approx(model.step_s(1, held))
    assert now() - began > model.prefill_s(held)


@pytest.mark.parametrize(("level", "held"), [(1, 1002), (2, 0)])
@virtual
async def test_sleep_and_wake_last_what_weights_and_caches_take_to_host_memory(tmp_path, level, held):
    engine, model = await started(tmp_path, stream=1), roofline()
    chunks = await first_of(engine, 1000)
    await anext(chunks)
    await engine.suspend()

    assert await takes(engine.sleep(level)) == pytest.approx(model.sleep_s(held))
    assert await takes(engine.sleep(level)) == 0.0
    assert await takes(engine.wake()) == pytest.approx(model.sleep_s(held))
    assert await takes(engine.wake()) == 0.0


@virtual
async def test_new_weights_come_to_one_that_sleeps_as_it_wakes(tmp_path):
    engine, model = await started(tmp_path), roofline()
    await engine.sleep(2)

    assert await takes(engine.update(1, weights_image(write_model(tmp_path / "model")))) == 0.0
    assert await takes(engine.wake()) == pytest.approx(model.sleep_s(0))
    assert engine.load().version == 1


@virtual
async def test_another_degree_lasts_what_its_change_takes_and_then_as_that_many_gpus(tmp_path):
    engine, model, four = await started(tmp_path), roofline(), roofline(degree=4)

    assert await takes(engine.reconfigure(4)) == pytest.approx(model.reconfigure_s(0, four))
    assert await takes(engine.reconfigure(4)) == 0.0
    assert await takes(ask(engine, "a", 1000, 1)) == pytest.approx(four.prefill_s(1000))
    with pytest.raises(EngineError, match="degree=3 does not divide the 32 attention heads of qwen3-8b"):
        await engine.reconfigure(3)


@virtual
async def test_an_id_is_free_again_once_its_last_chunk_was_taken(tmp_path):
    engine = await started(tmp_path)
    chunks = engine.generate(Work("a", "s", (1,) * 100, Sampling(2)))
    last = await anext(chunks)

    with pytest.raises(EngineError, match="request a runs already"):
        await ask(engine, "a", 100, 2)
    await chunks.aclose()
    await ask(engine, "a", 100, 2)
    assert last.finish_reason == "length"


@virtual
async def test_a_request_that_is_dropped_in_a_step_may_come_back_at_once(tmp_path):
    engine = await started(tmp_path)
    chunks = engine.generate(Work("a", "s", (1,) * 100, Sampling(400)))
    await anext(chunks)
    await chunks.aclose()

    await ask(engine, "a", 100, 20)

    load = engine.load()
    assert (load.running, load.waiting) == (0, 0)


SIZES = [(f"r{i}", 200 + 10 * i) for i in range(32)]


@virtual
async def test_a_load_takes_what_rlsims_engine_says_of_it(tmp_path):
    """RLSim decodes the token that our prefill's last step gives too: of 200 tokens that is half a percent."""
    engine = await started(tmp_path, num_slots=16)
    async with asyncio.TaskGroup() as tasks:
        for name, prompt in SIZES:
            tasks.create_task(ask(engine, name, prompt, 200))

    timeline, spec = Timeline(), deployment_of(PaceSection(**H20)).model_copy(update={"num_slots": 16})
    modelled = ModelledEngine(timeline, "engine", Roofline(spec))
    asked = [timeline.start(modelled.generate(name, prompt, 200)) for name, prompt in SIZES]
    timeline.run()
    assert all(process.ended.happened for process in asked)

    assert now() == pytest.approx(timeline.now, rel=0.03)


def test_what_lies_between_two_steps_belongs_to_the_later_one():
    pace = EnginePace(PaceSection(**H20))

    assert pace.due(2.0, began=10.0, now=10.5) == 12.0
    assert pace.due(2.0, began=12.3, now=13.0) == 14.0
    pace.idle()
    assert pace.due(2.0, began=20.0, now=20.0) == 22.0
    assert (pace.num, pace.outlasted) == (3, 0)
    assert pace.busy_s == 6.0


def test_a_step_that_outlasts_its_pace_is_counted_and_what_follows_begins_at_its_end():
    pace = EnginePace(PaceSection(**H20))

    assert pace.due(2.0, began=10.0, now=15.0) == 15.0
    assert pace.due(2.0, began=15.0, now=15.1) == 17.0
    assert (pace.num, pace.outlasted) == (2, 1)
    assert pace.busy_s == 4.0


def test_a_mixed_step_is_its_prefills_and_one_batch_of_decodes():
    pace, model = EnginePace(PaceSection(**H20, scale=2.0)), roofline()
    rows = [Row(None, 0, 300), Row(None, 300, 600), Row(None, 40, 41), Row(None, 60, 61)]

    expected = model.prefill_s(300) + model.prefill_s(300, 300) + model.step_s(2, 100)
    assert pace.step_s(rows) == pytest.approx(2 * expected)


def test_kv_goes_over_the_nics_and_weights_come_from_host_memory():
    pace, spec = EnginePace(PaceSection(**H20, degree=2)), deployment_of(PaceSection(**H20))

    assert pace.kv_move_s(1000) == pytest.approx(1000 * spec.model.kv_bytes_per_token / (2 * 48.5e9))
    assert pace.swap_s() == pytest.approx(spec.model.weight_bytes / 2 / (14.19 * 2**30 / 0.9))


def test_sleep_and_another_degree_move_weights_and_caches_over_each_gpus_own_links():
    one, two = roofline(), roofline(degree=2)
    weights, kv, host_s = one.spec.model.weight_bytes, one.spec.model.kv_bytes_per_token, 14.19 * 2**30 / 0.9
    nvlink_s = one.spec.gpu.nvlink_busbw_bytes_s

    assert two.sleep_s(1000) == pytest.approx((weights + 1000 * kv) / 2 / host_s)
    assert one.reconfigure_s(1000, two) == pytest.approx(2.0 + weights / 2 / host_s + 1000 * kv / (2 * nvlink_s))
    assert two.reconfigure_s(1000, one) == pytest.approx(2.0 + weights / host_s + 1000 * kv / (2 * nvlink_s))
    assert two.reconfigure_s(1000, two) == 0.0
