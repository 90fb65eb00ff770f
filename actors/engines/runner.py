"""Holds the model, its KV cache and the current weights; computes one step for the rows the scheduler chose, and draws their tokens."""

from collections import abc
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from actors.engines.attention import AttentionShape, KVCache, arrange, build
from actors.engines.engine import EngineError
from actors.engines.hf_files import ModelConfig, folder_images, read_config
from actors.engines.model import Weights, forward, fuse, rotations, tensors_of
from actors.engines.scheduler import Row
from actors.engines.section import EngineSection
from actors.engines.sequence import Sequence, uniform

_LARGEST = 1 - 2.0**-23
"""Times any total, this is less than the total in float32: the largest number still names a token that has a probability."""


class ModelRunner:
    """Built and fed by different threads, one at a time; `step` and `weights` belong to the step loop once it runs."""

    def __init__(self, config: ModelConfig, weights: Weights, section: EngineSection, shape: AttentionShape) -> None:
        self.config = config
        self.weights = weights
        self._shape = shape
        self._rotary = rotations(config.rope, config.head_dim, section.max_len, shape.device)
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
        logits = forward(self.config, self.weights, self._rotary, self._cache, batch)
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


def draws_of(sequences: abc.Sequence[Sequence]) -> np.ndarray:
    """[R, 3] float32, how each row's next token is drawn: temperature (0 is greedy), top_p, and the number that picks it."""
    keys = np.array([sequence.key for sequence in sequences], np.uint64)
    positions = np.array([len(sequence.tokens) for sequence in sequences], np.uint64)
    draws = np.empty((len(sequences), 3), np.float32)
    draws[:, :2] = [sequence.temperature_top_p for sequence in sequences]
    draws[:, 2] = uniform(keys, positions)
    return draws


def sample(logits_RV: Tensor, draws_R3: np.ndarray) -> tuple[list[int], list[float]]:
    """Token id and log-probability per row of float32 `logits_RV`, drawn as `draws_of` says.

    Log-probabilities are of the full softmax at temperature 1, whatever temperature and top_p the token was drawn with.
    """
    greedy = draws_R3[:, 0] == 0.0
    logprobs_RV = logits_RV.log_softmax(-1)
    if greedy.all():
        chosen = logits_RV.argmax(-1, keepdim=True)
    else:
        chosen = _drawn(logits_RV, logprobs_RV, draws_R3)
        if greedy.any():
            rows = torch.from_numpy(greedy).to(logits_RV.device).unsqueeze(-1)
            chosen = torch.where(rows, logits_RV.argmax(-1, keepdim=True), chosen)
    return chosen.squeeze(-1).tolist(), logprobs_RV.gather(-1, chosen).squeeze(-1).tolist()


def _drawn(logits_RV: Tensor, logprobs_RV: Tensor, draws_R3: np.ndarray) -> Tensor:
    """[R, 1] the first token whose cumulative probability exceeds `uniform` of the total: never one of probability 0."""
    temperature, top_p, number = torch.from_numpy(draws_R3).to(logits_RV.device).split(1, -1)
    if (draws_R3[:, 0] == 1.0).all():
        probs = logprobs_RV.exp()
    else:
        probs = (logits_RV / temperature.masked_fill(temperature == 0.0, 1.0)).softmax(-1)
    if (draws_R3[:, 1] < 1.0).any():
        probs = _nucleus(probs, top_p)
    cumulative = probs.cumsum(-1)
    return torch.searchsorted(cumulative, number.clamp(max=_LARGEST) * cumulative[:, -1:], right=True)


def _nucleus(probs_RV: Tensor, top_p_R1: Tensor) -> Tensor:
    """Zero what lies outside the smallest set of most probable tokens that reaches top_p; rows with top_p 1 keep all."""
    ordered, order = probs_RV.sort(-1, descending=True)
    before = ordered.cumsum(-1) - ordered
    outside = (before >= top_p_R1) & (top_p_R1 < 1.0)
    outside[:, 0] = False
    return probs_RV.masked_fill(torch.zeros_like(outside).scatter_(-1, order, outside), 0.0)
