"""Figures of a CUDA GPU, part by part. tools/gpu_day.sh runs them all, each with a limit on its time.

python tools/bench/gpu.py                                     every part
python tools/bench/gpu.py engine trainer --shapes 0.6B        some; --concurrency 1 64 256 are the requests at once
python tools/bench/gpu.py --out runs/gpu_day                  also writes PART.json for each, and table.md of all that lie there
python tools/bench/gpu.py engine --short                      a tiny model, without a GPU too: it starts, its figures say nothing

Models have Qwen3's shapes and random weights. engine: tokens per second of the built-in engine, beside transformers' generate and vLLM
where that is installed, and the share of the bandwidth limit, by which each decode step reads all weights and the KV cache once. trainer:
tokens per second, and MFU by 6 FLOPs per parameter and token, by 4 where an adapter is trained (no gradient of the weights). swap: what new weights take on their way from trainer to engine, and what
requests feel of it. agreement: log-probabilities of the same tokens by engine and trainer. quickstart, gsm8k, ranks: whole jobs.
Without a GPU it says so and exits with 3: there is nothing to measure.
"""

import argparse
import asyncio
import json
import mmap
import os
import random
import subprocess
import sys
import tempfile
import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from rubato.actors.config import LoraSection, ModelSection, TrainSection  # noqa: E402
from rubato.actors.engines.engine import Work  # noqa: E402
from rubato.actors.engines.section import EngineSection  # noqa: E402
from rubato.actors.messages.generation import Sampling  # noqa: E402
from rubato.actors.messages.samples import Segment, Ticket, Trajectory  # noqa: E402
from rubato.bus.message import pack_i32, unpack_f32, unpack_i32  # noqa: E402
from tools.bench import gpu_jobs, gpu_table  # noqa: E402
from tools.bench.gpu_model import SHAPES, TINY, make_model  # noqa: E402
from tools.bench.short import NO_RESULT  # noqa: E402

PEAK = {"H200": (4.8e12, 989e12), "H100": (3.35e12, 989e12), "A100": (2.0e12, 312e12)}
"""Memory bandwidth in B/s and dense bf16 FLOP/s from NVIDIA's data sheets."""


class Size(NamedTuple):
    """How much is computed: tokens of a prompt and sampled after it, and of a trained sequence, of which there are `groups` times 8."""

    prompt: int = 128
    new_tokens: int = 256
    train_len: int = 1024
    groups: int = 4


class Bench(NamedTuple):
    """What every part is given."""

    device: str
    shapes: list[str]
    concurrency: list[int]
    size: Size
    out: Path

    @property
    def peak(self) -> tuple[float, float]:
        """As `PEAK`; of another device, what it reaches here."""
        return next((v for k, v in PEAK.items() if k in device_name(self.device)), reached(self.device))

    @property
    def model(self) -> ModelSection:
        return ModelSection(dtype="bfloat16", device=self.device)


def device_name(device: str) -> str:
    """As its maker calls it."""
    import torch

    return torch.cuda.get_device_name() if device == "cuda" else "CPU"


@cache
def reached(device: str) -> tuple[float, float]:
    """Bytes per second, read and written, of a large copy within the device, and FLOP/s of a large bfloat16 matrix product."""
    import torch

    size = 8192 if device == "cuda" else 256
    a, b = torch.randn(2, size, size, device=device, dtype=torch.bfloat16)
    into = torch.empty(16, size, size, device=device, dtype=torch.bfloat16)
    begun = into.clone()
    copy_s = seconds_of(lambda: into.copy_(begun), device)
    return 2 * into.nbytes / copy_s, 2 * size**3 / seconds_of(lambda: torch.mm(a, b), device)


def seconds_of(call: Callable[[], Any], device: str, times: int = 10) -> float:
    """Median of single calls, after three."""
    import torch

    taken: list[float] = []
    for _ in range(times + 3):
        began = time.perf_counter()
        call()
        if device == "cuda":
            torch.cuda.synchronize()
        taken.append(time.perf_counter() - began)
    return median(taken[3:])


@contextmanager
def models(bench: Bench, *, sharp: bool = False) -> Iterator[Iterator[tuple[str, Path, int]]]:
    """(shape, folder, parameters) of one model after the other; a folder lasts until the next."""
    with tempfile.TemporaryDirectory() as scratch:

        def made() -> Iterator[tuple[str, Path, int]]:
            for shape in bench.shapes:
                folder = Path(scratch, shape)
                yield shape, folder, make_model(folder, shape, bench.device, sharp=sharp)

        yield made()


def release(device: str) -> int:
    """Give unused memory back; returns the most that was held since the last call, in bytes."""
    import gc

    import torch

    gc.collect()
    if device != "cuda":
        return 0
    torch.cuda.synchronize()
    held = torch.cuda.max_memory_allocated()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return held


# -- engine --------------------------------------------------------------------------------------------------------


def engine_part(bench: Bench) -> dict[str, Any]:
    """Tokens per second by shape and concurrency."""
    found: dict[str, Any] = {}
    with models(bench) as made:
        for shape, folder, count in made:
            ours = asyncio.run(engine_rates(bench, folder))
            theirs = vllm_rates(bench, folder)
            for num in bench.concurrency:
                release(bench.device)
                row: dict[str, Any] = {**ours[num], "limit_tokens_s": decode_limit(bench, shape, count, num)}
                row["limit_share"] = row["tokens_s"] / row["limit_tokens_s"]
                row["transformers_tokens_s"] = transformers_rate(bench, folder, num)
                row["vllm_tokens_s"] = theirs.get(num)
                found[f"{shape}/{num}"] = row
                print(f"{shape} {num:4d} concurrent: {row['tokens_s']:9,.0f} tok/s, {row['limit_share']:.1%} of the limit, "
                      f"transformers {row['transformers_tokens_s']:9,.0f}", flush=True)  # fmt: skip
            found[f"{shape}/prefill"] = {"tokens_s": ours[0]["tokens_s"]}
            print(f"{shape} prefill: {ours[0]['tokens_s']:9,.0f} tok/s")
    if find_spec("vllm") is None:
        found["missing"] = "vLLM is not installed: nothing stands beside the engine but transformers"
        print(found["missing"])
    return found


def decode_limit(bench: Bench, shape: str, count: int, num: int) -> float:
    """Tokens per second of `num` sequences where each step reads `count` bfloat16 weights and all keys and values once."""
    sizes = SHAPES[shape]
    kv_bytes = 2 * sizes["num_hidden_layers"] * sizes["num_key_value_heads"] * sizes["head_dim"] * 2
    held = bench.size.prompt + bench.size.new_tokens / 2
    return num * bench.peak[0] / (2 * count + num * held * kv_bytes)


async def engine_rates(bench: Bench, folder: Path) -> dict[int, dict[str, float]]:
    """Decoding by concurrency, in the first pass after a few tokens to warm up and in a second one; under 0, prefill."""
    from rubato.actors.engines.torch_engine import TorchEngine

    size, most = bench.size, max(bench.concurrency)
    section = EngineSection(num_slots=most, max_len=size.prompt + size.new_tokens)
    engine = TorchEngine(folder, bench.model, section)
    await engine.start()
    found: dict[int, dict[str, float]] = {}
    for num in bench.concurrency:
        await rate(engine, f"{num}.warm", num, size.prompt, 8)
        first, again = [await rate(engine, f"{num}.{run}", num, size.prompt, size.new_tokens) for run in range(2)]
        found[num] = {"tokens_s": first, "again_tokens_s": again}
    long = size.prompt + size.new_tokens - 1
    for run in range(2):
        began = time.perf_counter()
        await asyncio.gather(*(generate(engine, f"p{run}.{i}", long, 1) for i in range(min(most, 64))))
        found[0] = {"tokens_s": min(most, 64) * long / (time.perf_counter() - began)}
    await engine.stop()
    return found


async def rate(engine: Any, name: str, num: int, prompt: int, new: int) -> float:
    """Sampled tokens per second of `num` requests at once, their prefill included."""
    began = time.perf_counter()
    await asyncio.gather(*(generate(engine, f"{name}.{i}", prompt, new) for i in range(num)))
    return num * new / (time.perf_counter() - began)


async def generate(engine: Any, request_id: str, prompt: int, new: int, decoding: asyncio.Event | None = None) -> list[float]:
    """When its chunks came, by the loop's clock; `decoding` is set with the eighth. No two requests share a prompt."""
    work = Work(request_id, "", tuple(random_prompt(request_id, prompt)), Sampling(new, seed=1))
    came: list[float] = []
    async for _ in engine.generate(work):
        came.append(asyncio.get_running_loop().time())
        if decoding is not None and len(came) == 8:
            decoding.set()
    return came


def random_prompt(seed: str, length: int) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(TINY["vocab_size"]) for _ in range(length)]


def transformers_rate(bench: Bench, folder: Path, num: int) -> float:
    """Static batch, the same prompt and completion lengths, after a short one."""
    import torch
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    model.to(bench.device)
    prompt = torch.randint(TINY["vocab_size"], (num, bench.size.prompt), device=bench.device)
    found = 0.0
    for new in (8, bench.size.new_tokens):
        began = time.perf_counter()
        model.generate(prompt, attention_mask=torch.ones_like(prompt), min_new_tokens=new, max_new_tokens=new, do_sample=True).cpu()
        found = num * new / (time.perf_counter() - began)
    return found


def vllm_rates(bench: Bench, folder: Path) -> dict[int, float]:
    """The same by concurrency of vLLM alone, in a process of its own; nothing where it is not installed."""
    if find_spec("vllm") is None:
        return {}
    program = ROOT / "tools" / "bench" / "gpu_vllm.py"
    sizes = [bench.size.prompt, bench.size.new_tokens, *bench.concurrency]
    ended = subprocess.run([sys.executable, program, folder, *map(str, sizes)], capture_output=True, text=True, check=False)  # fmt: skip
    if ended.returncode:
        print(f"vLLM gave no figures: {ended.stderr.strip().splitlines()[-1:]}", file=sys.stderr)
        return {}
    return {int(num): found for num, found in json.loads(ended.stdout.splitlines()[-1]).items()}


# -- trainer -------------------------------------------------------------------------------------------------------


def trainer_part(bench: Bench) -> dict[str, Any]:
    """One GRPO update over groups of 8 trajectories, with and without activations kept, and of an adapter; what does not fit is said."""
    import torch

    found: dict[str, Any] = {}
    with models(bench) as made:
        for shape, folder, count in made:
            for how, flops, keys in WAYS:
                release(bench.device)
                name = f"{shape}/{how}".removesuffix("/")
                try:
                    row = found[name] = trainer_rate(bench, folder, keys)
                except torch.OutOfMemoryError:
                    found[name] = {"memory_bytes": torch.cuda.get_device_properties(0).total_memory}
                    print(f"{name} trainer does not fit", flush=True)
                    continue
                row["mfu"] = flops * count * row["tokens_s"] / bench.peak[1]
                row["peak_bytes"] = release(bench.device)
                print(f"{name} trainer {row['tokens_s']:9,.0f} tok/s, MFU {row['mfu']:.0%}, {row['peak_bytes'] / 1e9:.1f} GB", flush=True)  # fmt: skip
    return found


LORA = LoraSection(rank=16, alpha=32)
WAYS: list[tuple[str, int, dict[str, Any]]] = [
    ("", 6, {}), ("checkpointing", 6, {"gradient_checkpointing": True}), ("adapter", 4, {"lora": LORA}),
]  # fmt: skip
"""Name of a way to train, FLOPs per parameter and token, and what its section says."""


def train_engine(section: TrainSection) -> Any:
    from rubato.actors.adapters.training import LoraTrainEngine
    from rubato.actors.training.torch_train import TorchTrainEngine

    return LoraTrainEngine if section.lora else TorchTrainEngine


def trainer_rate(bench: Bench, folder: Path, keys: dict[str, Any]) -> dict[str, float]:
    """Tokens per second of the updates after the first, with these keys of its section."""
    section = TrainSection(minibatches=1, micro_batch_tokens=16 * bench.size.train_len, **keys)
    engine = train_engine(section)(bench.model, section, steps=4, seed=1)
    engine.load(folder, None)
    groups = [[trajectory(bench, g, i) for i in range(8)] for g in range(bench.size.groups)]
    seconds: list[float] = []
    num_tokens = 0
    for step in (1, 2, 3):
        began = time.perf_counter()
        num_tokens = engine.train(step, groups).num_tokens  # its figures are floats: the device is done
        seconds.append(time.perf_counter() - began)
    return {"tokens_s": num_tokens / fmean(seconds[1:]), "first_tokens_s": num_tokens / seconds[0]}


def trajectory(bench: Bench, group: int, index: int) -> Trajectory:
    length, prompt = bench.size.train_len, bench.size.prompt
    tokens = random_prompt(f"{group}.{index}", length)
    mask = bytes([0] * prompt + [1] * (length - prompt))
    segment = Segment(pack_i32(tokens), mask, array("f", [-10.0] * length).tobytes(), ())
    ticket = Ticket(f"g{group}.{index}", f"g{group}", 1, group, group, 0)
    return Trajectory(ticket, (segment,), float(index % 2), 1, False, 0.0)


# -- swap ----------------------------------------------------------------------------------------------------------


def swap_part(bench: Bench) -> dict[str, Any]:
    """From trainer to engine by shared memory, while requests decode: with their KV caches computed anew after it, and kept; an adapter too."""
    found: dict[str, Any] = {}
    with models(bench) as made:
        for shape, folder, _ in made:
            for how in ("recompute", "keep", "adapter"):
                release(bench.device)
                row = found[f"{shape}/{how}"] = asyncio.run(swaps(bench, folder, how))
                print(
                    f"{shape} swap {row['bytes'] / 1e6:,.0f} MB, {row['gb_s']:.1f} GB/s in {row['update_s']:.2f} s, pause {1e3 * row['pause_s']:.2f} ms, "
                    f"{row['hidden_frac']:.1%} hidden; longest gap between tokens {1e3 * row['gap_s']:.0f} ms ({how}), else "
                    f"{1e3 * row['usual_gap_s']:.0f} ms; trainer held for {1e3 * row['export_s']:.0f} of {1e3 * row['whole_s']:.0f} ms",
                    flush=True,
                )
    return found


async def swaps(bench: Bench, folder: Path, how: str, times: int = 3) -> dict[str, float]:
    """Medians over `times` updates after the first, in each of which 64 requests decode."""
    from rubato.actors.adapters.torch_engine import AdaptedTorchEngine
    from rubato.actors.engines.torch_engine import TorchEngine

    train, caches = TrainSection(lora=LORA if how == "adapter" else None), "keep" if how == "keep" else "recompute"
    trainer = train_engine(train)(bench.model, train, steps=1, seed=1)
    trainer.load(folder, None)
    num_bytes = trainer.image_bytes()
    handle = os.memfd_create("weights")
    os.ftruncate(handle, num_bytes)
    image = memoryview(mmap.mmap(handle, num_bytes))
    os.close(handle)
    num = min(64, max(bench.concurrency))
    section = EngineSection(num_slots=num, max_len=bench.size.prompt + 2 * bench.size.new_tokens, stream_every=1, kv_on_update=caches)
    engine = (AdaptedTorchEngine if train.lora else TorchEngine)(folder, bench.model, section)
    await engine.start()
    await rate(engine, "warm", num, bench.size.prompt, 8)
    rows: list[dict[str, float]] = []
    for version in range(1, times + 2):
        row: dict[str, float] = {}
        began = time.perf_counter()
        finish = trainer.export(image)
        row["export_s"] = time.perf_counter() - began
        await asyncio.to_thread(finish)
        row["whole_s"] = time.perf_counter() - began
        rows.append(row | await one_swap(bench, engine, num, version, image))
    await engine.stop()
    found = {name: median(row[name] for row in rows[1:]) for name in rows[0]}
    hidden = 1 - found["pause_s"] / found["update_s"]
    return found | {"bytes": num_bytes, "gb_s": num_bytes / found["update_s"] / 1e9, "hidden_frac": hidden}


async def one_swap(bench: Bench, engine: Any, num: int, version: int, image: memoryview) -> dict[str, float]:
    """The update, its pause as the engine says it, and the longest time that one of `num` requests waited for a token during it."""
    loop, new, decoding = asyncio.get_running_loop(), 2 * bench.size.new_tokens, asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(generate(engine, f"{version}.{i}", bench.size.prompt, new, decoding)) for i in range(num)]
        await decoding.wait()
        began = loop.time()
        pause_s = await engine.update(version, image)
        ended = loop.time()
    came = [task.result() for task in running]
    gaps = [(before, after - before) for times in came for before, after in pairwise(times)]
    within = [gap for before, gap in gaps if began <= before + gap and before <= ended]
    beside = sorted(gap for before, gap in gaps if before > ended)
    usual = beside[int(0.99 * (len(beside) - 1))] if beside else 0.0
    return {"update_s": ended - began, "pause_s": pause_s, "gap_s": max(within, default=0.0), "usual_gap_s": usual}


# -- agreement -----------------------------------------------------------------------------------------------------


def agreement_part(bench: Bench) -> dict[str, Any]:
    """|Δ log-prob| of sampled tokens, between engine and trainer and of either to the trainer in float32; nats."""
    found: dict[str, Any] = {}
    for sharp in (False, True):
        with models(bench, sharp=sharp) as made:
            for shape, folder, _ in made:
                for dtype in ("bfloat16", "float32"):
                    release(bench.device)
                    name = f"{shape}/{dtype}" + "/sharp" * sharp
                    row = found[name] = asyncio.run(differences(bench, folder, dtype))
                    print(
                        f"{name}: mean |Δlogp| {row['mean']:.1e}, largest {row['max']:.1e}, over {row['tokens']:.0f} tokens; to float32 "
                        f"the engine {row['engine_to_float32']:.1e}, the trainer {row['trainer_to_float32']:.1e}",
                        flush=True,
                    )
    return found


async def differences(bench: Bench, folder: Path, dtype: Any) -> dict[str, float]:
    """32 prompts of 8 tokens to many, 32 tokens sampled after each by one batch."""
    from rubato.actors.engines.torch_engine import TorchEngine

    model = ModelSection(dtype=dtype, device=bench.device)
    engine = TorchEngine(folder, model, EngineSection(num_slots=32, max_len=bench.size.train_len))
    await engine.start()
    works = [
        Work(f"r{i}", "", tuple(random_prompt(f"a{i}", 8 + i * (bench.size.train_len - 40) // 32)), Sampling(32, seed=i))
        for i in range(32)
    ]  # fmt: skip
    sampled = await asyncio.gather(*(collected(engine, work) for work in works))
    await engine.stop()
    sequences = [[*work.prompt, *ids] for work, (ids, _) in zip(works, sampled, strict=True)]
    engines = [value for _, values in sampled for value in values]
    trainers, exact = recomputed(model, folder, sequences), recomputed(
        ModelSection(dtype="float32", device=bench.device), folder, sequences
    )  # fmt: skip
    gaps = [abs(a - b) for a, b in zip(engines, trainers, strict=True)]
    return {
        "tokens": len(gaps),
        "mean": fmean(gaps),
        "max": max(gaps),
        "engine_to_float32": fmean(abs(a - b) for a, b in zip(engines, exact, strict=True)),
        "trainer_to_float32": fmean(abs(a - b) for a, b in zip(trainers, exact, strict=True)),
        "mean_logprob": fmean(engines),
    }


async def collected(engine: Any, work: Work) -> tuple[list[int], list[float]]:
    ids: list[int] = []
    logprobs: list[float] = []
    async for chunk in engine.generate(work):
        ids += unpack_i32(chunk.tokens.ids)
        logprobs += unpack_f32(chunk.tokens.logprobs)
    return ids, logprobs


def recomputed(model: ModelSection, folder: Path, sequences: list[list[int]]) -> list[float]:
    """The trainer's log-probabilities of the last 32 tokens of each."""
    from rubato.actors.training.torch_train import TorchTrainEngine

    engine = TorchTrainEngine(model, TrainSection(), steps=1, seed=1)
    engine.load(folder, None)
    return [value for values in engine.logprobs(sequences) for value in values[-32:]]


# -- the command ---------------------------------------------------------------------------------------------------

PARTS: dict[str, Any] = {
    "engine": engine_part,
    "trainer": trainer_part,
    "swap": swap_part,
    "agreement": agreement_part,
    "quickstart": gpu_jobs.quickstart_part,
    "gsm8k": gpu_jobs.gsm8k_part,
    "ranks": gpu_jobs.ranks_part,
}


def about(device: str) -> dict[str, Any]:
    """With what it was measured."""
    import platform

    import torch
    import transformers

    return {
        "device": device_name(device),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "copy_bytes_s": reached(device)[0],
        "matmul_flop_s": reached(device)[1],
    }


def bench_of(given: argparse.Namespace, device: str) -> Bench:
    if given.short:
        return Bench(device, ["tiny"], [1, 4], Size(8, 16, 64, 2), given.out)
    return Bench(device, given.shapes, given.concurrency, Size(), given.out)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)}; all where none is named")
    parser.add_argument("--shapes", nargs="+", choices=[s for s in SHAPES if s != "tiny"], default=["0.6B", "1.7B"])
    parser.add_argument("--concurrency", nargs="+", type=int, default=[1, 64, 256])
    parser.add_argument("--out", type=Path, help="folder for PART.json and table.md")
    parser.add_argument("--short", action="store_true", help="a tiny model; its figures say nothing")
    given = parser.parse_args()
    if unknown := [part for part in given.parts if part not in PARTS]:
        parser.error(f"{unknown[0]} is no part. Parts are {', '.join(PARTS)}")
    import torch

    if not torch.cuda.is_available() and not given.short:
        print("no CUDA GPU here: nothing was measured", file=sys.stderr)
        return 3
    bench = bench_of(given, "cuda" if torch.cuda.is_available() else "cpu")
    for name in given.parts or PARTS:
        began = time.perf_counter()
        found = PARTS[name](bench)
        said = {"part": name, "seconds": time.perf_counter() - began, **about(bench.device), "found": found}
        if given.out:
            given.out.mkdir(parents=True, exist_ok=True)
            (given.out / f"{name}.json").write_text(json.dumps(said, indent=2))
            (given.out / "table.md").write_text(gpu_table.table(given.out))
    if given.short:
        print(NO_RESULT)
    return 0


if __name__ == "__main__":
    sys.exit(main())
