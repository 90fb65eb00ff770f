"""The table of docs/gpu.md, from what the parts of tools/bench/gpu.py wrote: `python tools/bench/gpu_table.py runs/gpu_day`."""

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

Row = tuple[str, str, str]
"""What was measured, the figure, and what it is to be seen beside."""


def engine(found: Mapping[str, Any]) -> Iterator[Row]:
    for name, row in figures(found):
        shape, _, num = name.partition("/")
        if num == "prefill":
            yield f"engine, {shape}, prefill", f"{row['tokens_s']:,.0f} tok/s", ""
            continue
        beside = f"transformers {row['transformers_tokens_s']:,.0f}"
        if row["vllm_tokens_s"]:
            beside += f", vLLM alone {row['vllm_tokens_s']:,.0f}"
        limit = f"bandwidth limit {row['limit_tokens_s']:,.0f}: {row['limit_share']:.1%}; {beside}"
        yield f"engine, {shape}, {num} at once", f"{row['tokens_s']:,.0f} tok/s", limit


def trainer(found: Mapping[str, Any]) -> Iterator[Row]:
    for name, row in figures(found):
        shape, _, how = name.partition("/")
        what = f"trainer, {shape}" + {"": "", "checkpointing": ", gradient checkpointing", "adapter": ", adapter of rank 16"}[how]
        if "memory_bytes" in row:
            yield what, "does not fit", f"{row['memory_bytes'] / 1e9:.0f} GB are there"
            continue
        yield what, f"{row['tokens_s']:,.0f} tok/s", f"MFU {row['mfu']:.0%}; {row['peak_bytes'] / 1e9:.0f} GB at most"


def swap(found: Mapping[str, Any]) -> Iterator[Row]:
    for name, row in figures(found):
        shape, _, how = name.partition("/")
        gaps = f"longest gap between tokens {1e3 * row['gap_s']:.0f} ms, {1e3 * row['usual_gap_s']:.0f} ms without (p99)"
        if how == "keep":
            yield f"swap, {shape}, KV caches kept", f"pause {1e3 * row['pause_s']:.2f} ms", gaps
            continue
        took = f"of {1e3 * row['update_s']:.0f} ms ({row['gb_s']:.1f} GB/s): {row['hidden_frac']:.1%} hidden; {gaps}"
        size = f"adapter of {row['bytes'] / 1e6:.0f} MB" if how == "adapter" else f"{row['bytes'] / 1e9:.1f} GB"
        yield f"swap, {shape}, {size}", f"pause {1e3 * row['pause_s']:.2f} ms", took
        whole = f"of {1e3 * row['whole_s']:.0f} ms until the image is whole"
        yield f"publish, {shape}{', adapter' * (how == 'adapter')}", f"training held {1e3 * row['export_s']:.1f} ms", whole


def agreement(found: Mapping[str, Any]) -> Iterator[Row]:
    for name, row in figures(found):
        shape, dtype, *sharp = name.split("/")
        limit = "limit 3e-2" if dtype == "bfloat16" else "limit 1e-3"
        apart = f"to float32: engine {row['engine_to_float32']:.1e}, trainer {row['trainer_to_float32']:.1e}"
        what = f"agreement, {shape}, {dtype}" + ", embeddings × 5" * bool(sharp)
        yield what, f"mean abs. Δlogp {row['mean']:.1e}", f"{limit}; {apart}"


def quickstart(found: Mapping[str, Any]) -> Iterator[Row]:
    rewards = f"reward {found['reward_first']:.2f} → {found['reward_last']:.2f}, held out {found['held_out']:.2f}"
    yield "quickstart", rewards, f"{found['train_s']:.0f} s of training, {found['wall_s']:.0f} s from command to end"


def gsm8k(found: Mapping[str, Any]) -> Iterator[Row]:
    waited = f"{found['wait_for_batch_frac']:.0%} of it waiting for a batch"
    yield (f"GSM8K's shape, engine {found['engine']}", f"{found['step_s']:.1f} s a step", f"{waited}; {found['samples_s']:.0f} samples/s")
    if "pause_s" in found:
        hidden = f"of {1e3 * found['pull_s']:.0f} ms: {found['hidden_frac']:.1%} hidden"
        yield "its swap", f"pause {1e3 * found['pause_s']:.2f} ms", hidden
    else:
        yield "its swap", "–", "the job ended before a row had one"
    yield ("its agreement", found["agreed"].rpartition("agree: ")[2].replace("|", ""), f"KL {found['mismatch_kl']:.1e} in training")


def ranks(found: Mapping[str, Any]) -> Iterator[Row]:
    if "step_s" in found:
        yield "two ranks, GSM8K's shape", f"{found['step_s']:.1f} s a step", f"{found['samples_s']:.0f} samples/s"


ROWS: Mapping[str, Callable[[Mapping[str, Any]], Iterator[Row]]] = {
    "engine": engine, "trainer": trainer, "swap": swap, "agreement": agreement, "quickstart": quickstart, "gsm8k": gsm8k, "ranks": ranks,
}  # fmt: skip


def figures(found: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    return ((name, row) for name, row in found.items() if isinstance(row, dict))


def table(folder: Path) -> str:
    """Markdown of all PART.json in `folder`: with what it was measured, the figures, and what was missing."""
    parts = [json.loads(path.read_text()) for name in ROWS if (path := folder / f"{name}.json").exists()]
    about = {f"{p['device']}, torch {p['torch']}, transformers {p['transformers']}, Python {p['python']}" for p in parts}
    copies, products = (max((p[name] for p in parts), default=0.0) for name in ("copy_bytes_s", "matmul_flop_s"))
    ceilings = f"Reached there: copies {copies / 1e12:.2f} TB/s, bf16 matrix products {products / 1e12:.0f} TFLOP/s"
    lines = [*sorted(about), ceilings, "", "| what | figure | beside it |", "|---|--:|---|"]
    lines += [f"| {' | '.join(row)} |" for part in parts for row in ROWS[part["part"]](part["found"])]
    lines += [f"\nMissing ({p['part']}): {p['found']['missing']}." for p in parts if "missing" in p["found"]]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(table(Path(sys.argv[1])), end="")
