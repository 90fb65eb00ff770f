"""What a sampled digest costs, on the engine's side and on the trainer's, for a model of so many MiB of float32.

    python tools/bench/weights_digest.py [--mib 1024] [--times 50]

The engine's model is a decoder of Qwen3's form, fused and transposed as the built-in engine computes with it.
"""

import argparse
import json
import math
import mmap
import sys
from pathlib import Path
from time import thread_time

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from actors.engines.hf_files import ModelConfig, Rope, shapes_of  # noqa: E402
from actors.engines.model import AttentionShape, fuse  # noqa: E402
from actors.engines.runner import HOST, ModelRunner  # noqa: E402
from actors.engines.section import EngineSection  # noqa: E402
from actors.model_folder import read_header, sampled_slices  # noqa: E402
from actors.weights.blobs import WeightsSample  # noqa: E402

HIDDEN, VOCAB = 1024, 16384


def config_of(mib: int) -> ModelConfig:
    """A model of about so many MiB, as many layers as that takes."""
    size, heads = HIDDEN, HIDDEN // 64
    layer = 4 * (2 * size * size + 2 * size * size // 2 + 3 * size * 3 * size)
    layers = max(1, round((mib * 2**20 - 4 * VOCAB * size) / layer))
    rope = Rope(10000.0)
    return ModelConfig(
        "qwen3", VOCAB, size, 3 * size, layers, heads, heads // 2, 64, 1e-6, rope, True, True, False, False, False, 4096, None
    )  # fmt: skip


def image_of(shapes: dict[str, tuple[int, ...]]) -> memoryview:
    """A safetensors image whose numbers say nothing."""
    places: dict[str, object] = {}
    at = 0
    for name, shape in shapes.items():
        begin, at = at, at + 4 * math.prod(shape)
        places[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [begin, at]}
    text = json.dumps(places).encode()
    image = memoryview(mmap.mmap(-1, 8 + len(text) + at))
    torch.frombuffer(image, dtype=torch.uint8).fill_(1)  # every page is there, as that of weights just written is
    image[: 8 + len(text)] = len(text).to_bytes(8, "little") + text
    return image


def timed(call, times: int) -> list[float]:  # noqa: ANN001 - any call
    """Milliseconds of CPU of each of `times` calls, which are given their number, ascending."""
    found: list[float] = []
    for number in range(times):
        began = thread_time()
        call(number)
        found.append(1e3 * (thread_time() - began))
    return sorted(found)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--times", type=int, default=50)
    given = parser.parse_args()
    torch.set_num_threads(1)
    config = config_of(given.mib)
    shapes = shapes_of(config)
    tensors = {name: torch.ones(shape) for name, shape in shapes.items()}
    weights = fuse(config, tensors, "the bench", HOST, torch.float32)
    del tensors
    section = EngineSection(num_slots=1, max_len=64)
    width, folded = config.num_kv_heads * config.head_dim, config.num_heads // config.num_kv_heads
    runner = ModelRunner(config, weights, section, AttentionShape(64, width, folded, 1, HOST, torch.float32))
    image = image_of(shapes)
    header = read_header(image, "the bench")
    places = timed(lambda number: sampled_slices(read_header(image, "the bench"), 1, number), given.times)
    slices = [sampled_slices(header, 1, number) for number in range(given.times)]
    engine = timed(lambda number: runner.digest(slices[number]), given.times)
    sample = timed(lambda number: WeightsSample.of(image, 1, number), given.times)
    taken, told = WeightsSample.of(image, 1, 0), runner.digest(slices[0])
    compared = timed(lambda _: taken.differing(told), given.times)
    print(
        f"{len(image) / 2**20:.0f} MiB in {len(shapes)} tensors; milliseconds of one thread's CPU, median (largest) of {given.times}"
    )
    for what, figures in (
        ("places, from the header", places), ("engine's digest", engine), ("trainer's sample", sample), ("comparison", compared),
    ):  # fmt: skip
        print(f"{what:24} {figures[len(figures) // 2]:6.2f} ({figures[-1]:.2f})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
