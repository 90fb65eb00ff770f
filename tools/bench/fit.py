"""What `rubato fit` reckons for a trainer, beside the peak of its memory that is measured on a CPU.

python tools/bench/fit.py [--json] [--short]

Each shape trains two steps of two micro-batches in a process forked of this one. `resident` is the highest resident memory of the steps
beyond what the process had before it read the model; `measured` is the same where the allocator gives back at once what is freed, so that
tensors alone count; `reckoned` is all but the library itself and checkpoints. `ratio` is of reckoned to measured. With --short: it starts,
its figures say nothing.
"""

import argparse
import ctypes
import json
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from rubato.actors import catalog  # noqa: E402
from rubato.actors.config import LoraSection, ModelSection, TrainSection  # noqa: E402
from rubato.actors.report.fit import adapter_params  # noqa: E402
from rubato.actors.training.torch_train import TorchTrainEngine  # noqa: E402
from rubato.planning.memory import Training, trained  # noqa: E402
from tools.bench.forked import forked  # noqa: E402
from tools.bench.ranks import batch, memory  # noqa: E402
from tools.bench.short import NO_RESULT  # noqa: E402

LENGTH, TOKENS = 128, 512
MMAP_THRESHOLD, SMALL = -3, 64 * 1024
"""Of glibc's mallopt: what is larger than SMALL bytes has pages of its own, and leaves them when it is freed."""

TINY: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "vocab_size": 256}
LORA = LoraSection(rank=16)

SHAPES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "deep, float32": ({"hidden_size": 320, "intermediate_size": 960, "num_hidden_layers": 6, "vocab_size": 2048}, {}),
    "wide, bfloat16, checkpointing": (
        {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 4, "vocab_size": 8192},
        {"dtype": "bfloat16", "gradient_checkpointing": True},
    ),
    "large vocabulary, adapter": (
        {"hidden_size": 384, "intermediate_size": 1152, "num_hidden_layers": 6, "vocab_size": 16384},
        {"lora": LORA},
    ),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--short", action="store_true")
    given = parser.parse_args()
    rows: dict[str, dict[str, float]] = {}
    for name, (sizes, train) in SHAPES.items():
        row = rows[name] = compared(sizes, train, short=given.short)
        if not given.json:
            told = f"{row['measured_mb']:7.0f} MB measured {row['reckoned_mb']:7.0f} reckoned  ratio {row['ratio']:.2f}"
            told += f"  {row['resident_mb']:7.0f} resident"
            print(f"{name:<32} {told}", flush=True)
    if given.json:
        print(json.dumps(rows))
    if given.short:
        print(NO_RESULT)
    return 0


def compared(sizes: dict[str, Any], options: dict[str, Any], *, short: bool) -> dict[str, float]:
    """One shape."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    sizes = TINY if short else sizes
    length, tokens = (16, 64) if short else (LENGTH, TOKENS)
    heads: dict[str, Any] = {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 1024}
    train = TrainSection(micro_batch_tokens=tokens, minibatches=1, **options)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        Qwen3ForCausalLM(Qwen3Config(**heads, **sizes)).save_pretrained(folder / "model")
        shape = catalog.shape_of(folder / "model")
        steps = [[_of_length(group, length) for group in batch(seed, 2 * tokens // (4 * length), length)] for seed in range(2)]

        Qwen3ForCausalLM(Qwen3Config(**heads, **TINY)).save_pretrained(folder / "tiny")

        def work(rank: int, *, gives_back: bool) -> int:
            if gives_back:
                ctypes.CDLL(None).mallopt(MMAP_THRESHOLD, SMALL)
            first = engine_of(ModelSection(path=str(folder / "tiny"), device="cpu"), train)
            first.load(folder / "tiny", None)
            first.train(1, steps[0][:1])  # what libraries keep for themselves is there from here on
            before = memory("VmRSS")
            engine = engine_of(ModelSection(path=str(folder / "model"), device="cpu"), train)
            engine.load(folder / "model", None)
            Path("/proc/self/clear_refs").write_text("5")  # the peak so far was of reading files
            for number, groups in enumerate(steps, 1):
                engine.train(number, groups)
            return memory("VmHWM") - before

        measured, resident = (forked(1, folder, partial(work, gives_back=gives_back))[0] for gives_back in (True, False))
    width = 2 if train.dtype == "bfloat16" else 4
    lora = adapter_params(shape, train.lora) if train.lora else 0
    found, _ = trained(shape, Training(tokens, width, 4, checkpointing=train.gradient_checkpointing, adapter_params=lora, on_cpu=True))
    reckoned = found.total - found.other
    return {"measured_mb": measured / 1e6, "reckoned_mb": reckoned / 1e6, "ratio": reckoned / measured, "resident_mb": resident / 1e6}


def engine_of(model: ModelSection, train: TrainSection) -> TorchTrainEngine:
    if train.lora is None:
        return TorchTrainEngine(model, train, steps=9, seed=1)
    from rubato.actors.adapters.training import LoraTrainEngine

    return LoraTrainEngine(model, train, steps=9, seed=1)


def _of_length(group: list[Any], length: int) -> list[Any]:
    """Rollouts of a group made equally long, so that micro-batches are full."""
    import struct

    from rubato.actors.messages.generation import VersionSpan
    from rubato.actors.messages.samples import Segment

    tokens = [number % 32 for number in range(length)]
    logprobs = struct.pack(f"<{length}f", *([-3.0] * length))
    segment = Segment(struct.pack(f"<{length}i", *tokens), bytes([0, *[1] * (length - 1)]), logprobs, (VersionSpan(0, 1, length),))
    import msgspec

    return [msgspec.structs.replace(each, segments=(segment,)) for each in group]


if __name__ == "__main__":
    sys.exit(main())
