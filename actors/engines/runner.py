"""Holds the model, its KV cache and the current weights; computes one step for the rows the scheduler chose."""

from pathlib import Path

import torch

from actors.engines.batch import AttentionShape, arrange, build
from actors.engines.engine import EngineError
from actors.engines.kv_cache import KVCache
from actors.engines.model import forward
from actors.engines.model_config import ModelConfig, read_config
from actors.engines.model_weights import Weights, fuse, rotations, tensors_of
from actors.engines.sampling import draws_of, sample
from actors.engines.scheduler import Row
from actors.engines.section import EngineSection
from actors.engines.weights import folder_images


class ModelRunner:
    """Built and fed by different threads, one at a time; `step` and `weights` belong to the step loop once it runs."""

    def __init__(self, config: ModelConfig, weights: Weights, section: EngineSection, shape: AttentionShape) -> None:
        self.config = config
        self.weights = weights
        self._shape = shape
        self._turns = rotations(config.rope, config.head_dim, section.max_len, shape.device)
        self._cache = KVCache(config, section.num_slots, section.max_len, shape.device, shape.dtype)

    @classmethod
    def load(cls, folder: Path, section: EngineSection, *, device: str, dtype: str, threads: int) -> "ModelRunner":
        """Read an HF model folder. Raises EngineError with one sentence when files are missing or do not fit."""
        torch.set_num_threads(threads)
        config = read_config(folder)
        place = pick_device(device)
        kind = torch.bfloat16 if dtype == "bfloat16" else torch.float32
        tensors = {n: t for source, image in folder_images(folder) for n, t in tensors_of(image, source).items()}
        weights = fuse(config, tensors, place, kind)
        kv_width = config.num_kv_heads * config.head_dim
        return cls(
            config,
            weights,
            section,
            AttentionShape(section.max_len, kv_width, config.num_heads // config.num_kv_heads, threads, place, kind),
        )

    def prepare(self, image: memoryview, source: str) -> Weights:
        """New weights beside the old ones: from any thread, while steps go on. Raises EngineError when they do not fit."""
        return fuse(self.config, tensors_of(image, source), self._shape.device, self._shape.dtype)

    def step(self, rows: list[Row]) -> tuple[list[Row], list[int], list[float]]:
        """Compute `rows`; returns them as packed, and a token id and log-probability per row that reached its end."""
        rows = arrange(rows)
        batch = build(rows, self._shape)
        ends = [row.sequence for row in rows if row.end == len(row.sequence.tokens)]
        logits = forward(self.config, self.weights, self._turns, self._cache, batch)
        if not ends:
            return rows, [], []
        return rows, *sample(logits, draws_of(ends))


def pick_device(name: str) -> torch.device:
    """`auto` is CUDA where present. Raises EngineError when CUDA is asked for and absent."""
    if name == "cuda" and not torch.cuda.is_available():
        raise EngineError(
            "model.device is cuda, but torch sees no CUDA device: set model.device=cpu, or install a CUDA build"
        )
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")
