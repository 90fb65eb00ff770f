"""Tokens per second of the built-in engine, the cost of a short turn, and the time from process start to ready.

python tools/bench/engine.py                        a 3 M-parameter random model at 1, 16 and 64 concurrent requests
python tools/bench/engine.py --transformers         beside transformers' generate (static batch) on the same model and load, in turns
python tools/bench/engine.py --model DIR --threads 1 --new-tokens 64
"""

import argparse
import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from actors.config import ModelSection  # noqa: E402
from actors.engines.engine import Work  # noqa: E402
from actors.engines.hf_files import read_config  # noqa: E402
from actors.engines.section import EngineSection  # noqa: E402
from actors.messages.generation import Sampling  # noqa: E402
from bus.message import unpack_i32  # noqa: E402

PROMPT = 16
TURN_NEW, TURN_SAMPLED, TURNS = 22, 2, 12

READY = """
import asyncio, sys
from pathlib import Path
from actors.config import ModelSection
from actors.engines.section import EngineSection
from actors.engines.torch_engine import TorchEngine

async def main():
    engine = TorchEngine(Path(sys.argv[1]), ModelSection(torch_threads=int(sys.argv[2])), EngineSection())
    await engine.start()
    print("ready", flush=True)
    await engine.stop()

asyncio.run(main())
"""


def write_model(folder: Path, hidden: int = 256, layers: int = 4, heads: int = 8, vocab: int = 512) -> None:
    """A random Qwen3 in HF format, head size 32, half as many KV heads."""
    import torch
    from safetensors.torch import save_file

    inner, size, kv = 3 * hidden, 32, heads // 2
    shapes = {"model.embed_tokens.weight": (vocab, hidden), "model.norm.weight": (hidden,)}
    for i in range(layers):
        at = f"model.layers.{i}."
        shapes |= {f"{at}{name}_layernorm.weight": (hidden,) for name in ("input", "post_attention")}
        shapes |= {f"{at}self_attn.{x}_norm.weight": (size,) for x in "qk"}
        shapes |= {
            f"{at}self_attn.{x}_proj.weight": (n * size, hidden) for x, n in (("q", heads), ("k", kv), ("v", kv))
        }
        shapes |= {f"{at}self_attn.o_proj.weight": (hidden, heads * size), f"{at}mlp.down_proj.weight": (hidden, inner)}
        shapes |= {f"{at}mlp.{x}_proj.weight": (inner, hidden) for x in ("gate", "up")}
    torch.manual_seed(0)
    tensors = {n: torch.randn(s) * 0.05 if len(s) == 2 else torch.ones(s) for n, s in shapes.items()}
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "head_dim": size,
        "vocab_size": vocab,
        "max_position_embeddings": 1024,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "eos_token_id": None,
        "bos_token_id": None,
    }
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    print(f"model: {sum(t.numel() for t in tensors.values()) / 1e6:.1f} M parameters, random")


def measure_ready(folder: Path, threads: int) -> None:
    """Seconds from starting a process until its engine takes requests."""
    began = time.perf_counter()
    command = [sys.executable, "-c", READY, str(folder), str(threads)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(ROOT)}) as process:
        assert process.stdout is not None
        process.stdout.readline()
        print(f"ready after {time.perf_counter() - began:.2f} s from process start")


async def measure(
    folder: Path,
    threads: int,
    concurrency: list[int],
    new_tokens: int,
    repeat: int,
    rival: Callable[[int], float] | None,
) -> None:
    """Throughput at each concurrency, then many short turns on cached sessions; the best of `repeat` runs each.

    `rival` gives another engine's tokens/s at a concurrency; its runs alternate with ours, so that both meet the same machine.
    """
    from actors.engines.torch_engine import TorchEngine

    vocab = read_config(folder).vocab_size
    section = EngineSection(num_slots=max([64, *concurrency]), max_len=512, stream_every=16)
    engine = TorchEngine(folder, ModelSection(torch_threads=threads), section)
    await engine.start()
    chance = random.Random(0)

    async def generate(request_id: str, session: str, prompt: list[int], num: int) -> list[int]:
        ids: list[int] = []
        async for chunk in engine.generate(Work(request_id, session, tuple(prompt), Sampling(num))):
            ids += unpack_i32(chunk.tokens.ids)
        return ids

    async def session(name: str) -> None:
        history = [chance.randrange(vocab) for _ in range(60)]
        for turn in range(TURNS):
            history += await generate(f"{name}.{turn}", name, history, TURN_SAMPLED)
            history += [chance.randrange(vocab) for _ in range(TURN_NEW)]

    async def throughput(num: int, run: int) -> float:
        prompts = [[chance.randrange(vocab) for _ in range(PROMPT)] for _ in range(num)]
        began = time.perf_counter()
        await asyncio.gather(*(generate(f"{num}.{run}.{i}", "", p, new_tokens) for i, p in enumerate(prompts)))
        return num * new_tokens / (time.perf_counter() - began)

    async def turns(num: int, run: int) -> float:
        began = time.perf_counter()
        await asyncio.gather(*(session(f"{num}.{run}.{i}") for i in range(num)))
        return (time.perf_counter() - began) / (num * TURNS) * 1e3

    for num in concurrency:
        ours: list[float] = []
        theirs: list[float] = []
        for run in range(repeat):
            ours.append(await throughput(num, run))
            if rival is not None:
                theirs.append(await asyncio.to_thread(rival, num))
        print(f"{num:4d} concurrent: {max(ours):8.0f} tokens/s (best of {repeat}, {new_tokens} new tokens each)")
        if theirs:
            ratio = statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
            print(f"{num:4d} in a static batch: {max(theirs):8.0f} tokens/s (transformers); median ratio {ratio:.2f}")
    for num in (32, 64):
        costs = [await turns(num, run) for run in range(repeat)]
        print(f"{num:4d} sessions: {min(costs):6.2f} ms per turn of {TURN_NEW} new and {TURN_SAMPLED} sampled tokens")
    await engine.stop()


def transformers_rate(folder: Path, threads: int, new_tokens: int) -> Callable[[int], float]:
    """Tokens/s of transformers' generate with a static batch of the given size."""
    import torch
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def rate(num: int) -> float:
        torch.set_num_threads(threads)
        ids = torch.randint(0, model.config.vocab_size, (num, PROMPT))
        options = {"do_sample": True, "top_k": 0, "pad_token_id": 0}
        length = {"max_new_tokens": new_tokens, "min_new_tokens": new_tokens}
        began = time.perf_counter()
        with torch.inference_mode():
            model.generate(ids, attention_mask=torch.ones_like(ids), **options, **length)
        return num * new_tokens / (time.perf_counter() - began)

    return rate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="an HF folder; without it a random 3 M-parameter Qwen3")
    parser.add_argument("--hidden", type=int, default=256, help="width of the random model")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--transformers", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.model or Path(scratch)
        if args.model is None:
            write_model(folder, args.hidden, heads=args.hidden // 32)
        measure_ready(folder, args.threads)
        rival = transformers_rate(folder, args.threads, args.new_tokens) if args.transformers else None
        asyncio.run(measure(folder, args.threads, args.concurrency, args.new_tokens, args.repeat, rival))


if __name__ == "__main__":
    main()
