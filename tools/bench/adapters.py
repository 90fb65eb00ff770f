"""What an adapter costs the built-in engine: a decode step without one, with one, with two mixed; and the way of a version, beside full weights.

    python tools/bench/adapters.py [--hidden 512] [--layers 8] [--slots 64] [--rank 16] [--json]

A random Qwen3 in float32 on one thread; each time is of the CPU and the least of several.
"""

import argparse
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import process_time
from typing import Any

import torch
from safetensors.torch import save

from rubato.actors.adapters import shapes
from rubato.actors.adapters.torch_engine import AdapterRunner
from rubato.actors.config import LoraSection, ModelSection
from rubato.actors.engines.engine import Work
from rubato.actors.engines.runner import ModelRunner
from rubato.actors.engines.scheduler import Row, Sequence
from rubato.actors.engines.section import EngineSection
from rubato.actors.messages.generation import Sampling

CONTEXT, TRIES = 64, 15


def model_in(folder: Path, hidden: int, layers: int) -> None:
    """A random model."""
    import transformers

    config = transformers.Qwen3Config(
        vocab_size=4096, hidden_size=hidden, intermediate_size=3 * hidden, num_hidden_layers=layers, num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 128, head_dim=64, max_position_embeddings=1024, tie_word_embeddings=True,
    )  # fmt: skip
    transformers.Qwen3ForCausalLM(config).save_pretrained(folder)


def adapter_of(folder: Path, lora: LoraSection) -> memoryview:
    """A random adapter, as it is published."""
    wanted = shapes.adapter_shapes(shapes.target_modules(shapes.shapes_in(folder), lora.targets), lora.rank)
    tensors = {name: torch.randn(shape) * 0.01 for name, shape in wanted.items()}
    return memoryview(save(tensors, shapes.telling(shapes.Scaled(lora.rank, lora.alpha), shapes.base_of(folder))))


def rows_of(num: int, names: tuple[str, ...]) -> list[Row]:
    """One token each of `num` requests in the middle of decoding, whose adapters take turns."""
    rows: list[Row] = []
    for slot in range(num):
        prompt = tuple(2 + (slot + place) % 1000 for place in range(CONTEXT))
        sequence = Sequence(Work(f"r{slot}", "", prompt, Sampling(8), adapter=names[slot % len(names)]), 2 * CONTEXT)
        sequence.slot, sequence.num_cached = slot, CONTEXT - 1
        rows.append(Row(sequence, CONTEXT - 1, CONTEXT))
    return rows


def least_ms(call: Callable[[], Any]) -> float:
    """Of `TRIES`."""
    times: list[float] = []
    for _ in range(TRIES):
        began = process_time()
        call()
        times.append(process_time() - began)
    return round(1e3 * min(times), 3)


def measure(folder: Path, slots: int, lora: LoraSection) -> dict[str, float]:
    """Milliseconds and bytes by name."""
    section = EngineSection(num_slots=slots, max_len=2 * CONTEXT)
    plain, adapted = (kind.load(folder, ModelSection(device="cpu"), section) for kind in (ModelRunner, AdapterRunner))
    assert isinstance(adapted, AdapterRunner)
    whole, image = memoryview((folder / "model.safetensors").read_bytes()), adapter_of(folder, lora)
    found: dict[str, float] = {"bytes_full": len(whole), "bytes_adapter": len(image)}
    found["step_base_ms"] = least_ms(lambda: plain.step(rows_of(slots, ("",))))
    adapted.swap(adapted.prepare(image, "it"))
    found["step_one_ms"] = least_ms(lambda: adapted.step(rows_of(slots, ("",))))
    adapted.swap(adapted.prepare(adapter_of(folder, lora), "other", "other"))
    found["step_two_mixed_ms"] = least_ms(lambda: adapted.step(rows_of(slots, ("", "other"))))
    found["step_two_held_one_used_ms"] = least_ms(lambda: adapted.step(rows_of(slots, ("",))))
    found["lay_out_full_ms"] = least_ms(lambda: plain.prepare(whole, "it"))
    found["lay_out_adapter_ms"] = least_ms(lambda: adapted.prepare(image, "it"))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("hidden", 512), ("layers", 8), ("slots", 64), ("rank", 16)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        model_in(Path(folder), given.hidden, given.layers)
        found = measure(Path(folder), given.slots, LoraSection(rank=given.rank, alpha=2 * given.rank))
    print(json.dumps(found) if given.json else "\n".join(f"{name:28} {value:12,.3f}" for name, value in found.items()))


if __name__ == "__main__":
    main()
