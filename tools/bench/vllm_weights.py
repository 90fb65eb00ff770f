"""What new weights cost vLLM: the pause and the whole, by its weight transfer from the host's blob, and by a copy and a reload beside it.

python tools/bench/vllm_weights.py [--rounds 7] [--layers 7] [--json]
python tools/bench/vllm_weights.py --short: it starts, its figures say nothing.

One vLLM of this process's own, with requests under way, is given versions that differ in every tensor, now by one way and now by the other.
`transfer` is what the engine does: the blob is looked at, and read where it lies. `copied` is what it did before: the blob is looked at and
copied into memory of its own, vLLM reads that. Pauses begin as vLLM is asked to pause and end as it goes on; medians of all rounds but the
first. The prefix cache is reset in both.
"""

import argparse
import asyncio
import importlib
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from rubato.actors.config import ModelSection  # noqa: E402
from rubato.actors.engines import vllm_launch  # noqa: E402
from rubato.actors.engines.engine import Work  # noqa: E402
from rubato.actors.engines.section import EngineSection  # noqa: E402
from rubato.actors.engines.vllm_engine import VllmEngine  # noqa: E402
from rubato.actors.engines.vllm_weights import ImagePlace, WorkerExtension, handed_over, tensors_at  # noqa: E402
from rubato.actors.messages.generation import Sampling, Tokens  # noqa: E402
from rubato.runtime.blobs.client import BlobClient  # noqa: E402
from rubato.runtime.blobs.server import BlobServer  # noqa: E402

SIZES: dict[str, int] = {"hidden_size": 512, "intermediate_size": 1536, "head_dim": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
SHORT = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
REQUESTS, TOKENS = 4, 80
OURS = vllm_launch.arguments


class BothWays(WorkerExtension):
    """Our extension with the way of before."""

    def swap_weights(self, path: str, names: list[str]) -> None:
        self.model_runner.reload_weights(weights_iterator=tensors_at([ImagePlace(path)], names))
        for module in self.model_runner.get_model().modules():
            if hasattr(module, "cpu_linear") and module.weight.numel():
                module.quant_method.process_weights_after_loading(module)


class CopyingEngine(VllmEngine):
    """An engine that is told from round to round which way to go."""

    copies = False

    @contextmanager
    def _copied(self, weights: memoryview) -> Iterator[ImagePlace]:
        with handed_over(weights) as path:
            yield ImagePlace(path)

    def lend(self, weights: memoryview) -> Any:
        return self._copied(weights) if self.copies else super().lend(weights)

    async def bring(self, version: int, place: ImagePlace) -> None:
        if not self.copies:
            await super().bring(version, place)
            return
        await self._llm.collective_rpc("swap_weights", args=(place.path, sorted(self._shapes)))
        await self._llm.update_weight_version(str(version))


def write_model(folder: Path, seed: int, layers: int, sizes: dict[str, int]) -> Path:
    torch, transformers = importlib.import_module("torch"), importlib.import_module("transformers")
    torch.manual_seed(seed)
    config = transformers.Qwen3Config(
        **sizes, num_hidden_layers=layers, vocab_size=1000, max_position_embeddings=1024, tie_word_embeddings=True, eos_token_id=1
    )
    transformers.Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


async def measured(folder: Path, given: argparse.Namespace) -> dict[str, Any]:
    sizes, layers, rounds = (SHORT, 2, 2) if given.short else (SIZES, given.layers, given.rounds)
    paths = [write_model(folder / str(seed), seed, layers, sizes) for seed in (0, 1)]
    images = [(path / "model.safetensors").read_bytes() for path in paths]
    server, client = BlobServer(folder / "blobs"), BlobClient(folder / "blobs")
    await server.start()
    section = EngineSection(kind="vllm", num_slots=8, max_len=512, vllm={"kv_cache_memory_bytes": 256 << 20})
    engine = CopyingEngine(paths[0], ModelSection(path=str(paths[0]), device="auto"), section)
    await engine.start()
    took: dict[str, list[tuple[float, float]]] = {"copied": [], "transfer": []}
    survived = 0
    try:
        version = 0
        for _ in range(rounds):
            for way, taken in took.items():
                version += 1
                await client.put("weights", version, 0, [images[version % 2]])
                _, image = await client.get("weights", version)
                engine.copies = way == "copied"
                async with asyncio.TaskGroup() as tasks:
                    under_way = [tasks.create_task(sampled(engine, f"{version}.{n}")) for n in range(REQUESTS)]
                    while engine.load().running < REQUESTS:  # noqa: ASYNC110 - nothing tells
                        await asyncio.sleep(0.01)
                    await asyncio.sleep(0.2)
                    began = time.perf_counter()
                    pause_s = await engine.update(version, image)
                    taken.append((pause_s, time.perf_counter() - began))
                found = [task.result() for task in under_way]
                survived += sum(len(tokens.ids) // 4 == TOKENS and len(tokens.spans) == 2 for tokens in found)
    finally:
        await engine.stop()
        await client.close()
        await server.close()
    figures = {
        f"{way}_{what}_s": round(median(each[at] for each in taken[1:]), 4)
        for way, taken in took.items()
        for at, what in enumerate(("pause", "total"))
    }
    return {"bytes": len(images[0]), "rounds": rounds - 1, "survived": survived, "asked": 2 * rounds * REQUESTS, **figures}


async def sampled(engine: VllmEngine, name: str) -> Tokens:
    tokens = Tokens()
    async for chunk in engine.generate(Work(name, name, (5, 6, 7), Sampling(TOKENS))):
        tokens = tokens + chunk.tokens
    return tokens


def arguments(folder: Path, model: ModelSection, section: EngineSection) -> Any:
    options = OURS(folder, model, section)
    options.worker_extension_cls = "tools.bench.vllm_weights.BothWays"
    return options


def main() -> int:
    parser = argparse.ArgumentParser(description="What new weights cost vLLM, by its weight transfer and by a copy beside it.")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--layers", type=int, default=7)
    parser.add_argument("--short", action="store_true")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    vllm_launch.arguments = arguments
    with tempfile.TemporaryDirectory() as folder:
        found = asyncio.run(measured(Path(folder), given))
    print(json.dumps(found) if given.json else "\n".join(f"{name}: {value}" for name, value in found.items()))
    return 0 if found["survived"] == found["asked"] else 1


if __name__ == "__main__":
    sys.exit(main())
