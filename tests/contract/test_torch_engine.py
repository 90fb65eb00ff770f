"""What only the built-in engine promises: Llama models, kept caches, chunked prefill, many small chunks in one."""

import asyncio
import subprocess
import sys
import threading
import weakref

import pytest

from rubato.actors.checkpoints.model_folder import read_header, sampled_slices
from rubato.actors.config import ModelSection
from rubato.actors.engines.engine import EngineDead, EngineError, Work
from rubato.actors.engines.section import EngineSection
from rubato.actors.engines.torch_engine import TorchEngine
from rubato.actors.messages.generation import Sampling, Tokens, VersionSpan
from rubato.actors.weights.transport import WeightsSample
from rubato.bus.message import unpack_f32, unpack_i32
from tests.contract.engines import whole_of
from tests.models import logprobs, weights_image, write_model

pytestmark = pytest.mark.slow


async def started(folder, **options) -> TorchEngine:
    section = EngineSection(**({"num_slots": 4, "max_len": 200} | options))
    engine = TorchEngine(folder, ModelSection(device="cpu"), section)
    await engine.start()
    return engine


async def collect(engine, work):
    tokens, chunks = Tokens(), 0
    async for chunk in engine.generate(work):
        tokens, chunks = tokens + chunk.tokens, chunks + 1
    return tokens, chunks


def difference(folder, work, tokens) -> float:
    ids, ours = unpack_i32(tokens.ids), unpack_f32(tokens.logprobs)
    theirs = logprobs(folder, [*work.prompt, *ids])[-len(ids) :]
    return max(abs(a - b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize(
    ("family", "max_batch_tokens"),
    [("qwen3", 7), ("qwen3", 2048), ("llama", 7), ("llama", 2048), ("mistral", 2048), ("qwen2", 2048), ("qwen3_moe", 7)],
)
async def test_every_family_agrees_with_transformers_even_when_prefill_is_cut(tmp_path, family, max_batch_tokens):
    folder = write_model(tmp_path, family)
    engine = await started(folder, max_batch_tokens=max_batch_tokens)
    works = [Work(f"r{i}", "", tuple(range(2, 30 + 10 * i)), Sampling(12)) for i in range(6)]

    results = await asyncio.gather(*(collect(engine, work) for work in works))
    await engine.stop()

    assert max(difference(folder, work, tokens) for work, (tokens, _) in zip(works, results, strict=True)) < 1e-4


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["qwen3", "llama", "mistral", "qwen2", "qwen3_moe"])
async def test_fused_and_turned_weights_are_told_as_they_were_published(tmp_path, family, dtype):
    write_model(tmp_path / "old", family)
    image = weights_image(write_model(tmp_path / "new", family, seed=1))
    engine = TorchEngine(tmp_path / "old", ModelSection(device="cpu", dtype=dtype), EngineSection(num_slots=2, max_len=64))
    await engine.start()
    whole = whole_of(image)
    parts = sampled_slices(read_header(image, "it"), 1, 1)

    before = await engine.digest(whole.slices)
    await engine.update(1, image)
    after, sampled = await engine.digest(whole.slices), await engine.digest(parts)
    await engine.stop()

    assert whole.differing(after) == []
    assert WeightsSample.of(image, 1, 1).differing(sampled) == []
    assert not any(sampled.slices[at : at + 8] == bytes(8) for at in range(0, len(sampled.slices), 8))
    assert whole.differing(before) == [cut.name for cut in whole.slices]


async def test_the_weights_that_were_replaced_are_freed_beside_the_steps_and_at_once(tmp_path):
    folder = write_model(tmp_path)
    engine = await started(folder)
    freed = []
    weakref.finalize(engine._steps.runner.weights.head, lambda: freed.append(threading.current_thread()))

    await engine.update(1, weights_image(folder))

    assert freed
    assert freed != [engine._steps]
    await engine.stop()


@pytest.mark.parametrize("turning", [(0, 7, 11), tuple(range(10)), (0, 1, 2, 3, 5, 8, 11)])
async def test_short_turns_that_attend_together_agree_with_transformers(tmp_path, turning):
    """Few sessions whose slots lie far apart are gathered; many are read as a range, idle slots and all."""
    folder = write_model(tmp_path)
    engine = await started(folder, num_slots=16)
    firsts = [Work(f"a{i}", f"s{i}", tuple(range(2, 12 + 3 * i)), Sampling(1)) for i in range(12)]
    histories = [
        [*work.prompt, *unpack_i32(tokens.ids)]
        for work, (tokens, _) in zip(firsts, await asyncio.gather(*(collect(engine, work) for work in firsts)), strict=True)
    ]

    await engine.suspend()
    works = [Work(f"b{i}", f"s{i}", (*histories[i], *range(40, 41 + i % 4 * 5)), Sampling(1 + i % 3)) for i in turning]
    asking = asyncio.gather(*(collect(engine, work) for work in works))
    await asyncio.sleep(0)
    await engine.resume()
    results = await asking
    await engine.stop()

    assert max(difference(folder, work, tokens) for work, (tokens, _) in zip(works, results, strict=True)) < 2e-5


async def test_recomputed_caches_make_a_running_request_agree_with_the_new_weights(tmp_path):
    write_model(tmp_path / "old")
    new = write_model(tmp_path / "new", seed=1)
    engine = await started(tmp_path / "old", stream_every=1)
    work = Work("a", "", (5, 6, 7, 8, 9), Sampling(40))
    chunks = engine.generate(work)
    tokens = (await anext(chunks)).tokens

    await engine.update(1, weights_image(new))
    async for chunk in chunks:
        tokens = tokens + chunk.tokens
    await engine.stop()
    swapped = tokens.spans[1].start
    theirs = logprobs(new, [*work.prompt, *unpack_i32(tokens.ids)])[len(work.prompt) - 1 :]

    assert tokens.spans == (VersionSpan(0, 0, swapped), VersionSpan(1, swapped, 40))
    assert unpack_f32(tokens.logprobs)[swapped:] == pytest.approx(theirs[swapped:], abs=1e-4)


async def test_kept_caches_stay_from_the_old_weights(tmp_path):
    write_model(tmp_path / "old")
    new = write_model(tmp_path / "new", seed=1)
    engine = await started(tmp_path / "old", kv_on_update="keep")
    prompt = tuple(range(2, 40))
    await collect(engine, Work("a", "session", prompt, Sampling(2)))

    await engine.update(1, weights_image(new))
    work = Work("b", "session", (*prompt, 50), Sampling(3))
    tokens, _ = await collect(engine, work)
    await engine.stop()

    assert difference(new, work, tokens) > 1e-3


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_a_cache_that_came_is_what_later_tokens_attend_to(tmp_path, dtype):
    folder = write_model(tmp_path)
    section = EngineSection(num_slots=4, max_len=200, stream_every=1)
    engine = TorchEngine(folder, ModelSection(device="cpu", dtype=dtype), section)
    await engine.start()
    asked = Work("a", "s", tuple(range(2, 60)), Sampling(40, seed=1))
    unmoved, _ = await collect(engine, asked)
    await engine.update(0, weights_image(folder))  # forgets what it kept for the session
    chunks = engine.generate(asked)
    await anext(chunks)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(drained(chunks))
        work = await engine.export("a", with_cache=True)

    async def rest_of(data) -> bytes:
        await engine.update(0, weights_image(folder))
        tokens, _ = await collect(engine, work._replace(cache=work.cache._replace(data=memoryview(data))))
        return work.resumed.ids + tokens.ids

    moved, misled = await rest_of(work.cache.data), await rest_of(bytes(len(work.cache.data)))
    await engine.stop()

    assert moved == unmoved.ids
    assert misled != unmoved.ids


async def drained(chunks) -> None:
    async for _ in chunks:
        pass


async def test_tokens_are_handed_out_every_so_many_and_at_the_end(tmp_path):
    engine = await started(write_model(tmp_path), stream_every=16)

    tokens, chunks = await collect(engine, Work("a", "", (5, 6), Sampling(40)))
    await engine.stop()

    assert len(tokens.ids) == 160
    assert chunks == 3


async def test_a_weights_image_of_another_shape_is_refused_by_name(tmp_path):
    engine = await started(write_model(tmp_path / "a"))
    other = weights_image(write_model(tmp_path / "b", vocab_size=101))

    with pytest.raises(EngineError, match=r"embed_tokens.weight has shape \[101, 64\]"):
        await engine.update(1, other)
    await engine.stop()


async def test_a_window_shorter_than_sequences_is_refused_and_never_ignored(tmp_path):
    folder = write_model(tmp_path, "mistral")

    with pytest.raises(EngineError, match="sliding_window of 256"):
        await started(folder, max_len=257)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda folder: (folder / "config.json").unlink(), "there is no .*config.json"),
        (lambda folder: (folder / "config.json").write_text("{"), "can't be read"),
        (lambda folder: (folder / "config.json").write_text('{"model_type": "mamba"}'), "mamba.*engine.kind=vllm"),
        (lambda folder: (folder / "model.safetensors").unlink(), "holds no"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"12345"), "not a safetensors image"),
    ],
)
async def test_a_model_folder_that_can_not_be_loaded_is_named_in_one_sentence(tmp_path, change, sentence):
    change(write_model(tmp_path))

    with pytest.raises(EngineError, match=sentence):
        await started(tmp_path)


def test_the_engine_never_imports_transformers():
    code = "import sys, rubato.actors.engines.torch_engine; print([m for m in sys.modules if m.startswith('transformers')])"

    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)

    assert out.stdout.strip() == "[]"


def test_the_worker_is_imported_without_torch():
    code = "import sys, rubato.actors.engines.worker; print('torch' in sys.modules)"

    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)

    assert out.stdout.strip() == "False"


async def test_a_step_that_fails_ends_the_engine_and_everybody_hears_why(tmp_path):
    engine = await started(write_model(tmp_path))

    def broken(rows):
        raise RuntimeError("out of memory")

    engine._steps.runner.step = broken
    results = await asyncio.gather(*(collect(engine, Work(f"r{i}", "", (5, 6), Sampling(4))) for i in range(6)), return_exceptions=True)
    with pytest.raises(EngineDead, match="out of memory"):
        await engine.suspend()
    await engine.stop()

    assert {type(result) for result in results} == {EngineDead}
    assert all("out of memory" in str(result) for result in results)


async def test_a_request_that_waits_for_its_turn_hears_too_that_a_step_failed(tmp_path):
    engine = await started(write_model(tmp_path))
    begun, may_fail = threading.Event(), threading.Event()

    def broken(rows):
        begun.set()
        may_fail.wait(30)
        raise RuntimeError("out of memory")

    engine.started().runner.step = broken
    async with asyncio.timeout(30), asyncio.TaskGroup() as tasks:
        works = [Work(name, "", (5, 6), Sampling(4)) for name in ("first", "second")]
        asking = [tasks.create_task(outcome(collect(engine, works[0])))]
        await asyncio.to_thread(begun.wait, 30)
        asking.append(tasks.create_task(outcome(collect(engine, works[1]))))
        await asyncio.sleep(0)
        may_fail.set()
    await engine.stop()

    assert [type(asked.result()) for asked in asking] == [EngineDead, EngineDead]


async def test_commands_behind_one_that_breaks_the_engine_are_answered(tmp_path):
    engine = await started(write_model(tmp_path))
    held = threading.Event()

    def breaks():
        raise RuntimeError("out of memory")

    engine.started().post(held.wait, 30)
    async with asyncio.timeout(30), asyncio.TaskGroup() as tasks:
        commands = [engine.command(lambda steps: breaks()), engine.suspend(), collect(engine, Work("a", "", (5, 6), Sampling(4)))]
        asking = [tasks.create_task(outcome(command)) for command in commands]
        await asyncio.sleep(0)
        held.set()
    await engine.stop()

    assert [type(asked.result()) for asked in asking] == [EngineDead] * 3


async def outcome(asked):
    try:
        return await asked
    except EngineDead as error:
        return error


async def test_an_idle_engine_that_gathers_shares_its_first_step(tmp_path, monkeypatch):
    """Four requests that arrive one by one meet in one step; an engine that does not gather would begin with the first."""
    engine = await started(write_model(tmp_path), gather_s=1.0)
    sizes = []
    runner = engine.started().runner
    step = runner.step
    monkeypatch.setattr(runner, "step", lambda rows: (sizes.append(len(rows)), step(rows))[1])

    await asyncio.gather(*(later(i, collect(engine, Work(f"r{i}", "", (2, 3), Sampling(1)))) for i in range(4)))
    await engine.stop()

    assert sizes == [4]


async def later(ticks, work):
    for _ in range(20 * ticks):
        await asyncio.sleep(0)
    return await work


async def test_a_stopped_engine_tells_what_its_steps_cost(tmp_path, caplog):
    engine = await started(write_model(tmp_path, "qwen3"))
    caplog.set_level("INFO", logger="rubato.engines")

    await collect(engine, Work("r1", "", (1, 2, 3), Sampling(max_new_tokens=16)))
    await engine.stop()

    told = next(record.msg for record in caplog.records if "step_times" in str(record.msg))
    assert told["steps"] == 16
    assert told["tokens"] == 3 + 15
    assert told["process_cpu_s"] >= told["cpu_s"] > 0
    assert [(rows, tokens) for rows, tokens, _ in told["sampled"]] == [(1, 1), (1, 1)]
