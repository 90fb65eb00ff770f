"""Every engine, started, and what its tests say to it."""

import os
import random
import signal
import socket
import subprocess
import sys
from contextlib import aclosing, asynccontextmanager, contextmanager, suppress
from pathlib import Path

import httpx
import pytest

from rubato.actors.checkpoints.devices import num_gpus
from rubato.actors.checkpoints.model_folder import Slice, read_header, rows_of
from rubato.actors.config import ModelSection
from rubato.actors.engines.engine import ENGINES, EngineDead, Work
from rubato.actors.engines.section import EngineSection, PaceSection, ScriptedSection
from rubato.actors.engines.vllm_command import line
from rubato.actors.messages.generation import Tokens
from rubato.actors.weights.transport import WeightsSample
from rubato.runtime.importer import load_object
from tests.models import VOCAB

# vLLM and what it imports warn in many places of their own
OF_VLLM = [pytest.mark.vllm, pytest.mark.timeout(600), pytest.mark.filterwarnings("default")]
VLLM = pytest.param("vllm", marks=OF_VLLM)
SERVER = pytest.param("vllm_server", marks=[*OF_VLLM, pytest.mark.slow])

ROOT = Path(__file__).resolve().parents[2]

KINDS = ["scripted", "scripted paced", "torch", pytest.param("torch cuda", marks=pytest.mark.gpu), "torch paced", VLLM, SERVER]
MODELLED = KINDS[2:]
"""Engines that compute a model."""
DRAW_BY_POSITION = KINDS[:-2]
"""Engines whose seeded requests go on elsewhere as they would have here."""


KEY = "RUBATO_TEST_VLLM_KEY"
"""Environment variable with the key of servers."""


@contextmanager
def served(folder: Path, log: Path, **options):
    """A `vllm serve` of the model as `rubato vllm-command` has it, up and listening; its URL."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    given = {
        "kind": "vllm_server",
        "url": url,
        "api_key_env": KEY,
        "num_slots": 8,
        "max_len": 256,
        "vllm": {"kv_cache_memory_bytes": 32 << 20},
    }
    section = EngineSection(**(given | options))
    told = line(folder, ModelSection(path=str(folder), device="cpu"), section)
    added = {name: os.environ[KEY] if value == f"${KEY}" else value for name, value in told.environment.items()}
    quiet = {"VLLM_LOGGING_LEVEL": "WARNING", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, *told.words[1:]], stdout=file, stderr=file, start_new_session=True,
            env={**os.environ, **quiet, **added, "PYTHONPATH": paths},
        )  # fmt: skip
    try:
        while not up(url):
            assert process.poll() is None, log.read_text()[-2000:]
            with suppress(subprocess.TimeoutExpired):
                process.wait(0.2)
        yield url
    finally:
        process.terminate()
        try:
            process.wait(20)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def up(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=5, trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False


@asynccontextmanager
async def running(kind: str, folder: Path, **options):
    kind, *way = kind.split()
    if "cuda" in way and not num_gpus():
        pytest.skip("needs a GPU")
    section = EngineSection(
        **{
            "kind": kind,
            "api_key_env": KEY if kind == "vllm_server" else "",
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
