"""One step of the torch engine: the model on its device, its KV cache, and the draw of each row's next token."""

from collections import abc
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rubato.actors.checkpoints.hf_files import ModelConfig, check_length, folder_images, read_config
from rubato.actors.checkpoints.model_folder import DIGEST_BYTES, Slice, pick_device, slice_digest
from rubato.actors.config import ModelSection
from rubato.actors.engines.engine import Cache, EngineError
from rubato.actors.engines.model import (
    AttentionShape,
    KVCache,
    Linear,
    PackedBatch,
    Weights,
    arrange,
    array_of,
    build,
    forward,
    fuse,
    on_device,
    plain,
    rotations,
    stored_values,
    tensors_of,
)
from rubato.actors.engines.scheduler import Row, Sequence, uniform
from rubato.actors.engines.section import EngineSection
from rubato.actors.messages.weights import WeightsDigest

PIECE_BYTES = 16 << 20
"""Of each of two pinned buffers: one is filled while the other is on its way."""

HOST = torch.device("cpu")

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
        self._buffers = PinnedBuffers(shape.device) if shape.device.type == "cuda" else None
        self._home = shape.device
        """Where the weights are: on the device, or on the host of one that sleeps."""

    @classmethod
    def load(cls, folder: Path, model: ModelSection, section: EngineSection) -> "ModelRunner":
        """Read an HF model folder. Raises EngineError with one sentence when files are missing or do not fit."""
        torch.set_num_threads(model.torch_threads)
        # cuDNN plans its attention anew for each length of the keys, and that is each step of decoding: 35 ms of 44 on an H200.
        torch.backends.cuda.enable_cudnn_sdp(False)
        config = read_config(folder)
        check_length(config, section.max_len, folder)
        device = torch.device(pick_device(model.device, torch.cuda.device_count()))
        dtype = torch.bfloat16 if model.dtype == "bfloat16" else torch.float32
        tensors = {n: t for source, image in folder_images(folder) for n, t in tensors_of(image, source).items()}
        weights = fuse(config, tensors, str(folder), device, dtype)
        kv_width, folded = config.num_kv_heads * config.head_dim, config.num_heads // config.num_kv_heads
        shape = AttentionShape(section.max_len, kv_width, folded, model.torch_threads, device, dtype)
        return cls(config, weights, section, shape)

    def prepare(self, image: memoryview, source: str) -> Any:
        """What `swap` takes: new weights beside the old ones, from any thread, while steps go on. Raises EngineError when they do not fit."""
        tensors: abc.Mapping[str, Tensor] = tensors_of(image, source)
        if self._buffers is not None and self._home != HOST:
            tensors = Uploaded(tensors, self._buffers)
        return fuse(self.config, tensors, source, self._home, self._shape.dtype, published=True)

    def swap(self, weights: Any) -> None:
        """What `prepare` gave counts from the next step on."""
        self.weights = on_device(weights, self._home)

    def digest(self, slices: abc.Sequence[Slice]) -> WeightsDigest:
        """Of what steps compute with now; from any thread."""
        zeros, found = bytes(DIGEST_BYTES), self.stored(slices)
        there = [values.reshape(-1) for values in found if values is not None]
        data = torch.cat(there).cpu().view(torch.uint8).numpy() if there else np.empty(0, np.uint8)
        parts, at = [], 0
        for values in found:
            size = 0 if values is None else values.nbytes
            parts.append(slice_digest(data[at : at + size].data) if size else zeros)
            at += size
        return WeightsDigest(self._dtype, b"".join(parts))

    def stored(self, slices: abc.Sequence[Slice]) -> list[Tensor | None]:
        """Slices of what steps compute with now; None of a tensor that they don't. From any thread."""
        weights = self.weights
        return [stored_values(self.config, weights, cut) for cut in slices]

    # -- caches that move ---------------------------------------------------------------------------------------------

    def check_cache(self, request_id: str, cache: Cache | None) -> None:
        """Raises EngineError for keys and values of another model."""
        if cache is None:
            return
        expected, dtype = self._cache.shape_of(cache.num_tokens), self._dtype
        if (cache.shape, cache.dtype) != (expected, dtype) or len(cache.data) != self._cache.num_bytes(cache.num_tokens):
            raise EngineError(
                f"request {request_id} brought a cache of {list(cache.shape)} {cache.dtype}, this model has {list(expected)} {dtype}"
            )

    def take_cache(self, sequence: Sequence, version: int) -> Cache | None:
        """A copy of what the sequence's slot holds of it."""
        if sequence.slot < 0 or not sequence.num_cached:
            return None
        taken = self._cache.take(sequence.slot, sequence.num_cached)
        data = taken.view(torch.uint8).numpy().data.cast("B")
        return Cache(version, tuple(taken.shape), self._dtype, data)

    def put_cache(self, sequence: Sequence, cache: Cache) -> None:
        """Fill the sequence's slot."""
        self._cache.put(sequence.slot, array_of(cache.data, self._shape.dtype, cache.shape))

    @property
    def _dtype(self) -> str:
        return str(self._shape.dtype).removeprefix("torch.")

    # -- sleep ----------------------------------------------------------------------------------------------------------

    def move_to(self, device: torch.device | None, *, with_cache: bool) -> None:
        """Everything large goes to `device`, or (None) to the one that steps are computed on. Without its cache there is none on `device`,
        and an empty one where steps are computed.
        """
        self._home = device or self._shape.device
        self.weights = on_device(self.weights, self._home)
        if device is None or with_cache:
            self._cache.on(self._home, kept=with_cache)
        else:
            self._cache.drop()
        if self._shape.device.type == "cuda":
            torch.cuda.empty_cache()

    # -- steps ----------------------------------------------------------------------------------------------------------

    def step(self, rows: list[Row]) -> tuple[list[Row], list[int], list[float]]:
        """Compute `rows`; returns them as packed, and a token id and log-probability per row that reached its end."""
        rows = arrange(rows)
        batch = build(rows, self._shape)
        ends = [row.sequence for row in rows if row.end == len(row.sequence.tokens)]
        logits = forward(self.config, self.weights, self._rotary, self._cache, batch, self.linear_of(rows, batch))
        if not ends:
            return rows, [], []
        return rows, *sample(logits, draws_of(ends))

    def linear_of(self, rows: list[Row], batch: PackedBatch) -> Linear:
        """How the products of a step are made."""
        return plain


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

    Log-probabilities are of the distribution that was drawn from: at the row's temperature, and over what its top_p keeps. A greedy
    row has them at temperature 1, over the whole vocabulary.
    """
    greedy = draws_R3[:, 0] == 0.0
    temperature, top_p, number = torch.from_numpy(draws_R3).to(logits_RV.device).split(1, -1)
    if not np.isin(draws_R3[:, 0], (0.0, 1.0)).all():
        logits_RV = logits_RV / temperature.masked_fill(temperature == 0.0, 1.0)
    logprobs_RV = logits_RV.log_softmax(-1)
    if greedy.all():
        chosen = logits_RV.argmax(-1, keepdim=True)
    else:
        if (draws_R3[~greedy, 1] < 1.0).any():
            logprobs_RV = _nucleus(logprobs_RV, top_p.masked_fill(temperature == 0.0, 1.0))
        chosen = _drawn(logprobs_RV.exp(), number)
        if greedy.any():
            rows = torch.from_numpy(greedy).to(logits_RV.device).unsqueeze(-1)
            chosen = torch.where(rows, logits_RV.argmax(-1, keepdim=True), chosen)
    return chosen.squeeze(-1).tolist(), logprobs_RV.gather(-1, chosen).squeeze(-1).tolist()


def _drawn(probs_RV: Tensor, number_R1: Tensor) -> Tensor:
    """[R, 1] the first token whose cumulative probability exceeds `number` of the total: never one of probability 0."""
    cumulative = probs_RV.cumsum(-1)
    return torch.searchsorted(cumulative, number_R1.clamp(max=_LARGEST) * cumulative[:, -1:], right=True)


def _nucleus(logprobs_RV: Tensor, top_p_R1: Tensor) -> Tensor:
    """Log-probabilities within the smallest set of most probable tokens that reaches top_p, -inf outside; rows with top_p 1 stay."""
    ordered, order = logprobs_RV.exp().sort(-1, descending=True)
    before = ordered.cumsum(-1) - ordered
    outside = before >= top_p_R1
    outside[:, 0] = False
    cut = logprobs_RV.masked_fill(torch.zeros_like(outside).scatter_(-1, order, outside), -torch.inf)
    return torch.where(top_p_R1 < 1.0, cut.log_softmax(-1), logprobs_RV)


class PinnedBuffers:
    """Two buffers that a GPU reads by itself. One thread at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers = [torch.empty(PIECE_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        self._read = [torch.cuda.Event() for _ in range(2)]
        """What was sent last out of each has left it."""

    def send(self, tensor: Tensor) -> Tensor:
        """A copy of `tensor`, contiguous in host memory, on the device, in the order of the current stream; `tensor` may change at once.

        A copy out of memory that is not pinned would hold the driver, and with it every step, until it is done.
        """
        there = torch.empty(tensor.nbytes, dtype=torch.uint8, device=self._device)
        here = tensor.reshape(-1).view(torch.uint8)
        for number, piece in enumerate(here.split(PIECE_BYTES) if len(here) else ()):
            buffer, read = self._buffers[number % 2][: len(piece)], self._read[number % 2]
            read.synchronize()
            buffer.copy_(piece)
            at = number * PIECE_BYTES
            there[at : at + len(piece)].copy_(buffer, non_blocking=True)
            read.record(torch.cuda.current_stream(self._device))
        return there.view(tensor.dtype).view(tensor.shape)


class Uploaded(Mapping[str, Tensor]):
    """Tensors of host memory, each sent anew when it is asked for: the device holds no second image."""

    def __init__(self, tensors: Mapping[str, Tensor], buffers: PinnedBuffers) -> None:
        self._tensors = tensors
        self._buffers = buffers

    def __getitem__(self, name: str) -> Tensor:
        return self._buffers.send(self._tensors[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)
