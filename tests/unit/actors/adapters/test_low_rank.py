"""Adapters over the built-in engine: by its tokens' log-probabilities against peft's own, alone and mixed in one batch."""

import asyncio
from functools import partial

import pytest
import torch
from peft import LoraConfig, PeftModel, inject_adapter_in_model
from safetensors.torch import load, save
from transformers import AutoModelForCausalLM

from rubato.actors.adapters import shapes
from rubato.actors.adapters.torch_engine import AdaptedTorchEngine
from rubato.actors.adapters.training import fill, tensors_in
from rubato.actors.config import LoraSection, ModelSection
from rubato.actors.engines.engine import EngineError, Work
from rubato.actors.engines.section import EngineSection
from rubato.actors.messages.generation import Sampling, Tokens, VersionSpan
from rubato.bus.message import unpack_f32, unpack_i32
from tests.contract.engines import collect, whole_of
from tests.models import logprobs as base_logprobs
from tests.models import write_model

SMALL, OTHER = LoraSection(rank=4, alpha=8), LoraSection(rank=3, alpha=5, targets=("v_proj", "o_proj", "down_proj"))


@pytest.fixture
def engine(base):
    async def start(folder=base, dtype="float32", kind=AdaptedTorchEngine, **options):
        section = EngineSection(**({"num_slots": 8, "max_len": 128, "stream_every": 1} | options))
        found = kind(folder, ModelSection(device="cpu", dtype=dtype), section)
        await found.start()
        return found

    return start


def with_adapter(folder, image, lora, tokens):
    """log p of every token but the first, by peft in transformers."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    inject_adapter_in_model(LoraConfig(r=lora.rank, lora_alpha=lora.alpha, target_modules=list(lora.targets)), model, "it")
    fill(tensors_in(model, "it"), load(bytes(image)))
    with torch.inference_mode():
        logs = model(torch.tensor([tokens])).logits[0].log_softmax(-1)
    return [logs[i - 1, token].item() for i, token in enumerate(tokens) if i]


def gap(work, tokens, theirs):
    ids = unpack_i32(tokens.ids)
    expected = theirs([*work.prompt, *ids])[-len(ids) :]
    return max(abs(a - b) for a, b in zip(unpack_f32(tokens.logprobs), expected, strict=True))


@pytest.mark.parametrize("family", ["qwen3", "llama", "qwen2"])
async def test_tokens_are_sampled_under_the_adapter_that_came(family, tmp_path, adapter_image, engine):
    folder = write_model(tmp_path, family)
    subject, image = await engine(folder, max_batch_tokens=16), adapter_image(lora=SMALL, folder=folder)
    works = [Work(f"r{i}", "", tuple(range(2, 12 + 7 * i)), Sampling(6, seed=i)) for i in range(4)]

    before, _ = await collect(subject, works[0])
    await subject.update(3, image)
    after = [tokens for tokens, _ in await asyncio.gather(*(collect(subject, work) for work in works))]
    await subject.stop()

    assert gap(works[0], before, lambda ids: base_logprobs(folder, ids)) < 1e-4
    assert max(gap(w, t, lambda ids: with_adapter(folder, image, SMALL, ids)) for w, t in zip(works, after, strict=True)) < 1e-4
    assert gap(works[0], after[0], lambda ids: base_logprobs(folder, ids)) > 1e-2
    assert after[0].spans == (VersionSpan(3, 0, 6),)


async def test_one_batch_mixes_two_adapters_of_other_ranks_and_targets_with_the_base(base, adapter_image, engine):
    subject = await engine()
    images = {"a": (adapter_image(1, lora=SMALL), SMALL), "b": (adapter_image(2, lora=OTHER), OTHER)}
    for version, (name, (image, _)) in enumerate(images.items(), 5):
        await subject.update(version, image, name)
    decoded_at_once: list[int] = []
    subject.observe(lambda prefill, batch, context, seconds, times=1: decoded_at_once.append(batch))
    await subject.suspend()
    works = [Work(f"r{i}", "s", tuple(range(2, 9 + i)), Sampling(8, seed=i), adapter=("a", "b", "")[i % 3]) for i in range(6)]

    asking = asyncio.gather(*(collect(subject, work) for work in works))
    await asyncio.sleep(0)
    await subject.resume()
    results = [tokens for tokens, _ in await asking]
    await subject.stop()

    for work, tokens in zip(works, results, strict=True):
        theirs = partial(with_adapter, base, *images[work.adapter]) if work.adapter else partial(base_logprobs, base)
        assert gap(work, tokens, theirs) < 1e-4
        assert [span.version for span in tokens.spans] == [{"a": 5, "b": 6, "": 0}[work.adapter]]
    assert max(decoded_at_once) == len(works)
    assert subject._section.num_slots == 8


async def test_a_mixed_batch_gives_each_what_an_engine_gives_that_holds_its_adapter_alone(adapter_image, engine):
    images = {"a": adapter_image(1, lora=SMALL), "b": adapter_image(2, lora=OTHER)}
    works = [Work(f"r{i}", "", tuple(range(2, 9 + i)), Sampling(8, seed=i), adapter="ab"[i % 2]) for i in range(6)]

    async def sampled_by(names):
        subject = await engine()
        for name in names:
            await subject.update(1, images[name], name)
        await subject.suspend()
        asking = asyncio.gather(*(collect(subject, work) for work in works if work.adapter in names))
        await asyncio.sleep(0)
        await subject.resume()
        found = {work.request_id: tokens for work, (tokens, _) in zip([w for w in works if w.adapter in names], await asking, strict=True)}
        await subject.stop()
        return found

    alone, mixed = {**await sampled_by("a"), **await sampled_by("b")}, await sampled_by("ab")

    for name, tokens in mixed.items():
        assert tokens.ids == alone[name].ids
        assert unpack_f32(tokens.logprobs) == pytest.approx(unpack_f32(alone[name].logprobs), abs=1e-5)


async def test_one_that_is_dropped_is_refused_and_another_of_its_name_finds_no_cache_of_it(base, adapter_image, engine):
    subject, images = await engine(), [adapter_image(seed) for seed in (1, 2)]
    for name in ("a", "b"):
        await subject.update(7, images[0], name)
    await subject.suspend()
    asking = asyncio.gather(collect(subject, Work("r0", "s", tuple(range(2, 30)), Sampling(8), adapter="a")))
    await asyncio.sleep(0)  # the engine has it by then

    with pytest.raises(EngineError, match="requests under the adapter a are under way"):
        await subject.drop("a")
    await subject.resume()
    await asking
    await subject.drop("a")
    await subject.drop("a")
    with pytest.raises(EngineError, match="which this engine does not hold"):
        await collect(subject, Work("r1", "s", (5, 6), Sampling(2), adapter="a"))
    await subject.update(1, images[1], "a")
    works = [Work(f"n{name}", "s", tuple(range(2, 30)), Sampling(4), adapter=name) for name in ("a", "b")]
    found = [tokens for tokens, _ in await asyncio.gather(*(collect(subject, work) for work in works))]
    await subject.stop()

    for work, tokens, image in zip(works, found, (images[1], images[0]), strict=True):
        assert gap(work, tokens, lambda ids, image=image: with_adapter(base, image, SMALL, ids)) < 1e-4
    assert [tokens.spans[0].version for tokens in found] == [1, 7]


class TwoPlaces(AdaptedTorchEngine):
    most_adapters = 2


async def test_an_engine_holds_so_many_adapters_beside_that_of_the_run_and_says_so(adapter_image, engine):
    subject, image = await engine(kind=TwoPlaces), adapter_image(1)
    for name in ("a", "", "b", "a", ""):
        await subject.update(1, image, name)

    with pytest.raises(EngineError, match="version 1 of the adapter c: the engine holds 2 adapters already, and takes no more"):
        await subject.update(1, image, "c")
    await subject.drop("a")
    await subject.update(1, image, "c")
    await subject.stop()


async def test_turns_of_one_session_share_no_cache_between_adapters(base, adapter_image, engine):
    subject, image = await engine(), adapter_image(1, lora=SMALL)
    await subject.update(1, image, "a")
    prompt = tuple(range(2, 30))
    await collect(subject, Work("r0", "s", prompt, Sampling(2)))

    work = Work("r1", "s", prompt, Sampling(4), adapter="a")
    tokens, _ = await collect(subject, work)
    await subject.stop()

    assert gap(work, tokens, lambda ids: with_adapter(base, image, SMALL, ids)) < 1e-4


async def test_requests_under_way_mark_the_version_at_which_another_came(adapter_image, engine):
    subject = await engine()
    await subject.update(1, adapter_image(1))
    chunks = subject.generate(Work("a", "", (5, 6, 7), Sampling(40)))
    tokens = (await anext(chunks)).tokens

    await subject.update(2, adapter_image(2))
    async for chunk in chunks:
        tokens = tokens + chunk.tokens
    await subject.stop()

    swapped = tokens.spans[1].start
    assert tokens.spans == (VersionSpan(1, 0, swapped), VersionSpan(2, swapped, 40))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("held", [(), ("other",)])
async def test_an_engine_tells_of_the_tensors_that_it_computes_with(adapter_image, engine, dtype, held):
    subject, image = await engine(dtype=dtype), adapter_image(1)
    for name in held:
        await subject.update(1, adapter_image(9), name)
    whole = whole_of(image)
    await subject.update(0, adapter_image(2))
    before = await subject.digest(whole.slices)

    await subject.update(1, image)
    after = await subject.digest(whole.slices)
    await subject.stop()

    assert whole.differing(before) == [cut.name for cut in whole.slices]
    assert whole.differing(after) == []


async def test_the_base_is_never_written(adapter_image, engine):
    subject = await engine()
    weights = subject.started().runner.weights

    await subject.update(1, adapter_image(1))

    assert subject.started().runner.weights is weights
    await subject.stop()


async def test_an_adapter_goes_to_sleep_with_its_engine_and_wakes_with_it(base, adapter_image, engine):
    subject, image = await engine(), adapter_image(1)
    await subject.update(1, image)
    work = Work("a", "", (5, 6, 7), Sampling(5))

    await subject.sleep()
    await subject.wake()
    tokens, _ = await collect(subject, work)
    await subject.stop()

    assert gap(work, tokens, lambda ids: with_adapter(base, image, SMALL, ids)) < 1e-4


async def test_a_request_that_changes_engines_stays_on_its_adapter(base, adapter_image, engine):
    first, second = await engine(), await engine()
    for each in (first, second):
        await each.update(1, adapter_image(1), "a")
    work = Work("a", "s", (5, 6, 7), Sampling(30, seed=3), adapter="a")
    unmoved, _ = await collect(second, work)
    chunks = first.generate(work)
    tokens = (await anext(chunks)).tokens
    async with asyncio.TaskGroup() as tasks:
        rest = tasks.create_task(drained(chunks))
        moved = await first.export("a", with_cache=True)

    gone_on, _ = await collect(second, moved)
    await first.stop()
    await second.stop()

    assert (tokens + rest.result() + gone_on).ids == unmoved.ids


async def drained(chunks):
    tokens = Tokens()
    async for chunk in chunks:
        tokens = tokens + chunk.tokens
    return tokens


async def test_what_is_no_adapter_of_this_model_is_refused_and_changes_nothing(base, adapter_image, engine, tmp_path):
    subject, image = await engine(), adapter_image(1)
    await subject.update(1, image)
    other = adapter_image(1, folder=write_model(tmp_path, seed=1))
    tensors = load(bytes(image))
    told = dict(shapes.told_of(image))
    half = {name: tensor for name, tensor in tensors.items() if shapes.UP not in name}
    wider = {name: torch.cat([tensor, tensor], -1) for name, tensor in tensors.items()}

    for wrong, sentence in (
        (other, "another base model"),
        (memoryview((base / "model.safetensors").read_bytes()), "is no adapter"),
        (memoryview(save(half, told)), "lacks base_model"),
        (memoryview(save(wider, told)), r"has shape \[4, 128\]"),
        (memoryview(save({"base_model.model.h.0.lora_A.weight": torch.ones(4, 4)}, told)), "for which this model has no place"),
    ):
        with pytest.raises(EngineError, match=sentence):
            await subject.update(2, wrong)

    assert subject.load().version == 1
    assert whole_of(image).differing(await subject.digest(whole_of(image).slices)) == []
    await subject.stop()


async def test_a_request_for_an_adapter_that_is_not_held_is_refused_by_name(engine):
    subject = await engine()

    with pytest.raises(EngineError, match="is for the adapter tenant, which this engine does not hold"):
        await collect(subject, Work("a", "", (5, 6), Sampling(2), adapter="tenant"))
    await subject.stop()


def test_a_saved_adapter_means_the_same_to_peft(base, adapter_image, tmp_path):
    image = adapter_image(1)
    (tmp_path / shapes.WEIGHTS).write_bytes(image)
    (tmp_path / "adapter_config.json").write_bytes(shapes.config_image(SMALL, base))
    tokens = [4, 5, 6, 7]

    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), tmp_path).eval()

    with torch.inference_mode():
        logs = model(torch.tensor([tokens])).logits[0].log_softmax(-1)
    assert [logs[i - 1, t].item() for i, t in enumerate(tokens) if i] == pytest.approx(with_adapter(base, image, SMALL, tokens), abs=1e-5)
