"""Every engine, started, and what its tests say to it."""

import random
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import pytest

from actors.checkpoints.model_folder import Slice, num_gpus, read_header, rows_of
from actors.config import ModelSection
from actors.engines.engine import ENGINES, EngineDead, Work
from actors.engines.section import EngineSection, PaceSection, ScriptedSection
from actors.messages.generation import Tokens
from actors.weights.blobs import WeightsSample
from runtime.importer import load_object
from tests.models import VOCAB

KINDS = [
    "scripted",
    "scripted paced",
    "torch",
    pytest.param("torch cuda", marks=pytest.mark.gpu),
    "torch paced",
    # vLLM and what it imports warn in many places of their own
    pytest.param("vllm", marks=[pytest.mark.vllm, pytest.mark.timeout(600), pytest.mark.filterwarnings("default")]),
]
MODELLED = KINDS[2:]
"""Engines that compute a model."""
DRAW_BY_POSITION = KINDS[:-1]
"""Engines whose seeded requests go on elsewhere as they would have here."""


@asynccontextmanager
async def running(kind: str, folder: Path, **options):
    kind, *way = kind.split()
    if "cuda" in way and not num_gpus():
        pytest.skip("needs a GPU")
    section = EngineSection(
        **{
            "kind": kind,
            "num_slots": 8,
            "max_len": 256,
            "stream_every": 1,
            "scripted": ScriptedSection(token_s=0.002, stop_share=0.0),
            "pace": PaceSection(hardware="h20", model="qwen3-8b", scale=1e-3) if "paced" in way else None,
            "vllm": {"kv_cache_memory_bytes": 32 << 20} if kind == "vllm" else {},
        }
        | options
    )
    model = ModelSection(path=str(folder), device="cuda" if "cuda" in way else "cpu")
    engine = load_object(ENGINES[kind])(folder, model, section)
    await engine.start()
    try:
        yield engine
    finally:
        await engine.stop()


def pristine(engine) -> bool:
    try:
        load = engine.load()
    except EngineDead:
        return False
    return (load.version, load.running, load.waiting, load.suspended) == (0, 0, 0, False)


def prompt_of(seed: int, length: int = 12) -> tuple[int, ...]:
    chance = random.Random(seed)
    return tuple(chance.randrange(2, VOCAB) for _ in range(length))


async def collect(engine, work: Work) -> tuple[Tokens, str]:
    tokens, reason = Tokens(), ""
    async with aclosing(engine.generate(work)) as chunks:
        async for chunk in chunks:
            assert not reason, "a chunk came after the last one"
            tokens, reason = tokens + chunk.tokens, chunk.finish_reason
    return tokens, reason


def whole_of(image: memoryview) -> WeightsSample:
    """Every element of an image, each tensor in one slice."""
    places = read_header(image, "it")
    sizes = {name: rows_of(place.shape) for name, place in places.items()}
    slices = [Slice(name, 0, num, 0, width) for name, (num, width) in sizes.items()]
    return WeightsSample(slices, [(place.dtype, bytes(image[place.begin : place.end])) for place in places.values()])


async def first_tokens(chunks, num: int) -> Tokens:
    tokens = Tokens()
    while len(tokens.ids) // 4 < num:
        tokens = tokens + (await anext(chunks)).tokens
    return tokens


every_engine = pytest.mark.parametrize("engine", KINDS, indirect=True)
draws_by_position = pytest.mark.parametrize("engine", DRAW_BY_POSITION, indirect=True)
modelled_engine = pytest.mark.parametrize("engine", MODELLED, indirect=True)
