"""Engine, trainer and weight-swap figures on a CUDA GPU, for Qwen3 shapes of 0.6 B and 1.7 B parameters with random weights.

python tools/bench/gpu.py [--shapes 0.6B 1.7B] [--concurrency 1 64 256] [--json FILE]

Prints tokens per second of the built-in engine beside transformers' generate, the share of the memory-bandwidth limit (each decode
step reads all weights once), trainer tokens per second with MFU (6 FLOPs per parameter and token), and the swap rate. Without a GPU it
says so and exits with 3: there is nothing to measure.
"""

import argparse
import asyncio
import json
import sys
import tempfile
import time
from array import array
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from actors.config import ModelSection, TrainSection  # noqa: E402
from actors.engines.engine import Work  # noqa: E402
from actors.engines.section import EngineSection  # noqa: E402
from actors.messages.generation import Sampling  # noqa: E402
from actors.messages.samples import Segment, Ticket, Trajectory  # noqa: E402
from bus.message import pack_i32  # noqa: E402

SHAPES: dict[str, dict[str, Any]] = {
    "0.6B": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16},
    "1.7B": {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16},
}
"""Qwen3's published shapes; 8 KV heads, head size 128, tied embeddings."""
VOCAB, PROMPT, NEW_TOKENS, TRAIN_LEN = 151_936, 128, 256, 1024
PEAK = {"H200": (4.8e12, 989e12), "H100": (3.35e12, 989e12), "A100": (2.0e12, 312e12)}
"""Memory bandwidth in B/s and dense bf16 FLOP/s from NVIDIA's data sheets."""


def make_model(folder: Path, shape: str) -> int:
    """Random bf16 weights in HF format; returns the number of parameters."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen3Config

    config = Qwen3Config(
        **SHAPES[shape],
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=VOCAB,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    )
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    return sum(p.numel() for p in model.parameters())


async def engine_rates(folder: Path, concurrency: list[int]) -> tuple[dict[int, float], float]:
    """Tokens per second by concurrency, and bytes per second of an update."""
    from actors.engines.torch_engine import TorchEngine

    model = ModelSection(dtype="bfloat16", device="cuda")
    engine = TorchEngine(folder, model, EngineSection(num_slots=max(concurrency), max_len=PROMPT + NEW_TOKENS))
    await engine.start()
    rates = {}
    for num in concurrency:
        for run in range(2):  # the first warms kernels and allocator up
            began = time.perf_counter()
            await asyncio.gather(*(_generate(engine, f"{num}.{run}.{i}", i) for i in range(num)))
            rates[num] = num * NEW_TOKENS / (time.perf_counter() - began)
    image = b"".join(p.read_bytes() for p in folder.glob("*.safetensors"))
    seconds = await engine.update(1, memoryview(image))
    await engine.stop()
    return rates, len(image) / seconds


async def _generate(engine: Any, request_id: str, seed: int) -> None:
    prompt = tuple((seed * 7919 + i * 104_729) % VOCAB for i in range(PROMPT))
    async for _ in engine.generate(Work(request_id, "", prompt, Sampling(NEW_TOKENS, seed=seed))):
        pass


def transformers_rate(folder: Path, num: int) -> float:
    """Static batch, the same prompt and completion lengths."""
    import torch
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    model.cuda()
    prompt = torch.randint(VOCAB, (num, PROMPT), device="cuda")
    rate = 0.0
    for _ in range(2):
        torch.cuda.synchronize()
        began = time.perf_counter()
        model.generate(prompt, min_new_tokens=NEW_TOKENS, max_new_tokens=NEW_TOKENS, do_sample=True)
        torch.cuda.synchronize()
        rate = num * NEW_TOKENS / (time.perf_counter() - began)
    del model
    torch.cuda.empty_cache()
    return rate


def trainer_rate(folder: Path) -> float:
    """Tokens per second of one GRPO update over 4 groups of 8 trajectories."""
    from actors.training.torch_train import TorchTrainEngine

    train = TrainSection(minibatches=1, micro_batch_tokens=16 * TRAIN_LEN)
    engine = TorchTrainEngine(ModelSection(dtype="bfloat16", device="cuda"), train, steps=2, seed=1)
    engine.load(folder, None)
    groups = [[_trajectory(g, i) for i in range(8)] for g in range(4)]
    rate = 0.0
    for step in (1, 2):
        began = time.perf_counter()
        result = engine.train(step, groups)
        rate = result.num_tokens / (time.perf_counter() - began)
    return rate


def _trajectory(group: int, index: int) -> Trajectory:
    tokens = [(group * 31 + index * 17 + i * 104_729) % VOCAB for i in range(TRAIN_LEN)]
    mask = bytes([0] * PROMPT + [1] * (TRAIN_LEN - PROMPT))
    segment = Segment(pack_i32(tokens), mask, array("f", [-10.0] * TRAIN_LEN).tobytes(), ())
    ticket = Ticket(f"g{group}.{index}", f"g{group}", 1, group, group, 0)
    return Trajectory(ticket, (segment,), float(index % 2), 1, False, 0.0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--concurrency", nargs="+", type=int, default=[1, 64, 256])
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    import torch

    if not torch.cuda.is_available():
        print("no CUDA GPU here: nothing was measured", file=sys.stderr)
        return 3
    name = torch.cuda.get_device_name()
    bandwidth, flops = next((v for k, v in PEAK.items() if k in name), (float("nan"), float("nan")))
    found: dict[str, Any] = {"device": name}
    for shape in given.shapes:
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch)
            count = make_model(folder, shape)
            rates, swap = asyncio.run(engine_rates(folder, given.concurrency))
            for num, rate in rates.items():
                beside = transformers_rate(folder, num)
                share = rate / num * 2 * count / bandwidth
                print(
                    f"{shape} {num:4d} concurrent: {rate:9,.0f} tok/s, transformers {beside:9,.0f} ({rate / beside:.1f}x), {share:.0%} of bandwidth"
                )
                found[f"{shape}/{num}"] = {"tokens_s": rate, "transformers_tokens_s": beside, "bandwidth_share": share}
            trained = trainer_rate(folder)
            print(
                f"{shape} trainer {trained:9,.0f} tok/s, MFU {6 * count * trained / flops:.0%} · swap {swap / 1e9:.1f} GB/s"
            )
            found[f"{shape}/train"] = {"tokens_s": trained, "mfu": 6 * count * trained / flops, "swap_gb_s": swap / 1e9}
    if given.json:
        given.json.write_text(json.dumps(found, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
