"""What every engine promises that takes adapters: the one of the run, swapped in place, and others beside it in one batch."""

import asyncio

import pytest
import pytest_asyncio
import torch
from peft import LoraConfig, inject_adapter_in_model
from safetensors.torch import load, save
from transformers import AutoModelForCausalLM

from rubato.actors.adapters import shapes
from rubato.actors.adapters.training import fill, tensors_in
from rubato.actors.config import LoraSection, ModelSection
from rubato.actors.engines.engine import EngineError, Work
from rubato.actors.engines.section import EngineSection
from rubato.actors.messages.generation import Sampling, VersionSpan
from rubato.actors.plugins import ADAPTED_ENGINES
from rubato.actors.plugins import load as load_plugin
from rubato.bus.message import unpack_f32, unpack_i32
from tests.contract.engines import collect, prompt_of
from tests.models import logprobs, write_model

pytestmark = pytest.mark.slow

LORA = LoraSection(rank=4, alpha=8)
OTHER = LoraSection(rank=2, alpha=6, targets=("q_proj", "down_proj"))
"""Of a tenant: another rank than the run's, and other targets."""

KINDS = ["torch", pytest.param("vllm", marks=[pytest.mark.vllm, pytest.mark.timeout(600), pytest.mark.filterwarnings("default")])]


def image_of(folder, seed, lora=LORA):
    """An adapter with lively values."""
    chance = torch.Generator().manual_seed(seed)
    wanted = shapes.adapter_shapes(shapes.target_modules(shapes.shapes_in(folder), lora.targets), lora.rank)
    tensors = {name: torch.randn(*shape, generator=chance) * 0.2 for name, shape in wanted.items()}
    return memoryview(save(tensors, shapes.telling(shapes.Scaled(lora.rank, lora.alpha), shapes.base_of(folder))))


def with_adapter(folder, image, tokens, lora=LORA):
    """log p of every token but the first, by peft in transformers."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    inject_adapter_in_model(LoraConfig(r=lora.rank, lora_alpha=lora.alpha, target_modules=list(lora.targets)), model, "it")
    fill(tensors_in(model, "it"), load(bytes(image)))
    with torch.inference_mode():
        logs = model(torch.tensor([tokens])).logits[0].log_softmax(-1)
    return [logs[i - 1, token].item() for i, token in enumerate(tokens) if i]


def gap(folder, work, tokens, image, lora=LORA):
    ids = unpack_i32(tokens.ids)
    whole = [*work.prompt, *ids]
    theirs = (logprobs(folder, whole) if image is None else with_adapter(folder, image, whole, lora))[-len(ids) :]
    return sum(abs(a - b) for a, b in zip(unpack_f32(tokens.logprobs), theirs, strict=True)) / len(ids)


@pytest_asyncio.fixture(params=KINDS)
async def engine(request, model_folder):
    if request.param == "vllm":
        pytest.importorskip("vllm")
    vllm = {"kv_cache_memory_bytes": 32 << 20} if request.param == "vllm" else {}
    section = EngineSection(kind=request.param, num_slots=8, max_len=256, stream_every=1, vllm=vllm)
    options = {"lora": LORA} if request.param == "vllm" else {}
    subject = load_plugin(ADAPTED_ENGINES[request.param])(
        model_folder, ModelSection(path=str(model_folder), device="cpu"), section, **options
    )
    await subject.start()
    yield subject
    await subject.stop()


async def test_adapters_are_swapped_in_place_and_mixed_in_one_batch(engine, model_folder, tmp_path):
    """One test, since a start of vLLM takes a minute."""
    run, newer = (image_of(model_folder, seed) for seed in (1, 2))
    tenant, later = (image_of(model_folder, seed, OTHER) for seed in (3, 4))
    first = Work("r0", "", prompt_of(0), Sampling(8, seed=1))

    # before any version came: the base model
    before, _ = await collect(engine, first)
    assert gap(model_folder, first, before, None) < 1e-3

    # the run's own, and a newer one while a request is under way
    await engine.update(1, run)
    under_first, _ = await collect(engine, first._replace(request_id="r1"))
    assert gap(model_folder, first, under_first, run) < 1e-3
    assert gap(model_folder, first, under_first, None) > 1e-2
    assert under_first.spans == (VersionSpan(1, 0, 8),)
    chunks = engine.generate(Work("r2", "", prompt_of(2), Sampling(200)))
    tokens = (await anext(chunks)).tokens
    await engine.update(2, newer)
    async for chunk in chunks:
        tokens = tokens + chunk.tokens
    assert [span.version for span in tokens.spans] == [1, 2]

    # another beside it, both in one batch
    await engine.update(7, tenant, "tenant")
    works = [Work(f"m{i}", "s", prompt_of(i), Sampling(12, seed=i), adapter=("", "tenant")[i % 2]) for i in range(6)]
    await engine.suspend()
    asking = asyncio.gather(*(collect(engine, work) for work in works))
    await asyncio.sleep(0.01)
    await engine.resume()
    for work, (found, _) in zip(works, await asking, strict=True):
        assert gap(model_folder, work, found, *((tenant, OTHER) if work.adapter else (newer,))) < 1e-3
        assert found.spans == (VersionSpan(7 if work.adapter else 2, 0, 12),)

    # dropped, and another of its name: nothing of the first is left in any cache
    await engine.suspend()
    asking = asyncio.gather(collect(engine, works[1]._replace(request_id="r3")))
    await asyncio.sleep(0)  # the engine has it by then
    with pytest.raises(EngineError, match="requests under the adapter tenant are under way"):
        await engine.drop("tenant")
    await engine.resume()
    await asking
    await engine.drop("tenant")
    with pytest.raises(EngineError, match="is for the adapter tenant, which this engine does not hold"):
        await collect(engine, works[1]._replace(request_id="r4"))
    await engine.update(1, later, "tenant")
    found, _ = await collect(engine, works[1]._replace(request_id="r5"))
    assert gap(model_folder, works[1], found, later, OTHER) < 1e-3
    assert found.spans == (VersionSpan(1, 0, 12),)

    # what does not fit is refused, and what is held stays
    other = image_of(write_model(tmp_path / "other", seed=1), 1)
    with pytest.raises(EngineError, match="another base model"):
        await engine.update(3, other)
    with pytest.raises(EngineError, match="another base model"):
        await engine.update(3, other, "tenant")
    with pytest.raises(EngineError, match="is for the adapter nobody, which this engine does not hold"):
        await collect(engine, Work("x", "", (5, 6), Sampling(2), adapter="nobody"))
    assert engine.load().version == 2


async def test_adapters_come_back_with_an_engine_that_slept(engine, model_folder):
    run, tenant = image_of(model_folder, 1), image_of(model_folder, 3)
    await engine.update(1, run)
    await engine.update(2, tenant, "tenant")

    await engine.sleep()
    await engine.wake()
    works = [Work(f"m{i}", "", prompt_of(i), Sampling(6), adapter=adapter) for i, adapter in enumerate(("", "tenant"))]
    found = [tokens for tokens, _ in await asyncio.gather(*(collect(engine, work) for work in works))]

    assert max(gap(model_folder, *each) for each in zip(works, found, (run, tenant), strict=True)) < 1e-3
