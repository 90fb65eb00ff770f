"""One rank of training: a transformers model, AdamW, and one GRPO update at a time."""

import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors

from actors import checkpoint as checkpoints
from actors.config import ModelSection, TrainSection
from actors.messages.samples import Trajectory
from actors.model_folder import files_beside_weights
from actors.training import forward
from actors.training.engine import StepResult, TrainError
from actors.training.losses import clipped_policy_loss, group_advantages
from bus.message import unpack_f32, unpack_i32, unpack_u8


class TokenSequence(NamedTuple):
    """One context to train on. Lists of equal length T; `trained` is 1 where the token was sampled by the policy."""

    tokens: list[int]
    trained: list[int]
    behaviour: list[float]
    fresh: list[int]
    """1 where the token was sampled under the weights that are being updated."""
    advantage: float
    temperature: float = 1.0
    """Of the distribution that its log-probabilities are of."""


class MicroBatch(NamedTuple):
    """Right-padded: B sequences of T tokens. `rows_N, cols_N` point at the position *before* each of the N trained tokens."""

    tokens_BT: torch.Tensor
    rows_N: torch.Tensor
    cols_N: torch.Tensor
    targets_N: torch.Tensor
    behaviour_N: torch.Tensor
    advantages_N: torch.Tensor
    fresh_N: torch.Tensor
    temperatures_N: torch.Tensor


def sequences_of(trajectory: Trajectory, advantage: float, version: int) -> list[TokenSequence]:
    """A trajectory's segments. `version` is the weight version the update starts from."""
    found: list[TokenSequence] = []
    temperature = trajectory.temperature or 1.0  # a greedy choice has log-probabilities, and they are of temperature 1
    for segment in trajectory.segments:
        tokens = unpack_i32(segment.tokens)
        fresh = [0] * len(tokens)
        for span in segment.spans:
            if span.version == version:
                fresh[span.start : span.end] = [1] * (span.end - span.start)
        behaviour = unpack_f32(segment.logprobs)
        found.append(TokenSequence(tokens, unpack_u8(segment.mask), behaviour, fresh, advantage, temperature))
    return found


def pack(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Indices of `lengths`, longest first, cut into runs whose padded size (count × longest) stays within `max_tokens`.

    Every index appears exactly once; a sequence longer than `max_tokens` makes a run of its own.
    """
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    runs: list[list[int]] = []
    for index in order:
        if runs and (len(runs[-1]) + 1) * lengths[runs[-1][0]] <= max_tokens:
            runs[-1].append(index)
        else:
            runs.append([index])
    return runs


def micro_batch(sequences: Sequence[TokenSequence], device: torch.device) -> MicroBatch:
    """Pad and index. A sampled first token has nothing before it to predict it from, and is left out."""
    longest = max(len(s.tokens) for s in sequences)
    padded = [s.tokens + [0] * (longest - len(s.tokens)) for s in sequences]
    places = [(row, i, s) for row, s in enumerate(sequences) for i, trained in enumerate(s.trained) if trained and i]

    def floats(values: list[float]) -> torch.Tensor:
        return torch.tensor(values, device=device, dtype=torch.float32)

    def ints(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, device=device, dtype=torch.int64)

    return MicroBatch(
        torch.tensor(padded, device=device),
        ints([row for row, _, _ in places]),
        ints([i - 1 for _, i, _ in places]),
        ints([s.tokens[i] for _, i, s in places]),
        floats([s.behaviour[i] for _, i, s in places]),
        floats([s.advantage for _, _, s in places]),
        floats([s.fresh[i] for _, i, s in places]),
        floats([s.temperature for _, _, s in places]),
    )


WEIGHTS, OPTIMIZER, PROGRESS = "model.safetensors", "optimizer.state", "trainer.json"
"""Files of a checkpoint. A second *.safetensors would pass for weights where the checkpoint is the base of another run."""

OWN_FILES = {OPTIMIZER, PROGRESS, checkpoints.MANIFEST, checkpoints.RECEIPTS}
"""What makes a model folder a checkpoint; everything else in it describes the model."""


class TorchTrainEngine:
    """World size 1. Not thread-safe: the Trainer calls it from one offloaded call at a time."""

    def __init__(self, model: ModelSection, train: TrainSection, *, steps: int, seed: int) -> None:
        self._section = model
        self._train_section = train
        self._lr_steps = train.lr_steps or steps
        self._rng = random.Random(seed)
        self._model: Any = None
        self._masters: dict[str, torch.nn.Parameter] = {}
        self._optimizer: torch.optim.Optimizer
        self._described: dict[str, bytes] = {}
        self._step = 0
        torch.set_num_threads(model.torch_threads)
        torch.manual_seed(seed)
        wanted = model.device if model.device != "auto" else ("cuda" if torch.cuda.is_available() else "cpu")
        self._device = torch.device(wanted)

    def load(self, model_dir: Path, checkpoint: Path | None) -> tuple[int, int]:
        """(step, epoch) of what was loaded; (0, 0) for a base model."""
        source = checkpoint or model_dir
        if not any(source.glob("*.safetensors")):
            raise TrainError(f"model folder {source} has no *.safetensors. Set model.path to a folder in HF format.")
        manifest = checkpoints.check(checkpoint) if checkpoint else None
        section = self._train_section
        narrow = (self._section.dtype if section.dtype == "model" else section.dtype) == "bfloat16"
        self._model = forward.read_model(source, section.master_dtype if narrow else "float32", self._device)
        self._masters = forward.masters_of(self._model, torch.bfloat16 if narrow else torch.float32)
        if section.gradient_checkpointing:
            forward.checkpoint_layers(self._model)
        # Held, not copied at each save: the checkpoint they come from is pruned some steps later.
        self._described = {k: v for k, v in files_beside_weights(source).items() if k not in OWN_FILES}
        self._optimizer = torch.optim.AdamW(
            self._masters.values(), lr=section.lr, betas=section.betas, weight_decay=section.weight_decay, fused=True
        )
        if manifest is None:
            return 0, 0
        self._restore((source / OPTIMIZER).read_bytes(), (source / PROGRESS).read_bytes())
        self._step = manifest.step
        return manifest.step, manifest.epoch

    def train(self, step: int, groups: Sequence[Sequence[Trajectory]]) -> StepResult:
        """One update from version step - 1 to step; `train.minibatches` optimiser steps over whole groups."""
        lr = self._learning_rate(step)
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        useful = [g for g in (_advantaged(group, step - 1) for group in groups) if g]
        self._rng.shuffle(useful)
        # Minibatches keep their size: late in training few groups have spread, and updates on two of them are noise.
        count = max(1, math.ceil(self._train_section.minibatches * len(useful) / len(groups)))
        totals: dict[str, float] = {}
        num_tokens = 0
        num_skipped = 0
        norm = 0.0
        for index in range(count):
            sequences = [s for group in useful[index::count] for s in group]
            if not sequences:
                continue
            norm = self._update(sequences, totals, first=index == 0)
            num_skipped += not math.isfinite(norm)
            num_tokens += sum(len(s.tokens) for s in sequences)
        self._step = step
        return StepResult(
            _metrics(totals, norm, lr) | _reward_metrics(groups) | {"optim/skipped": num_skipped}, num_tokens
        )

    def logprobs(self, sequences: Sequence[Sequence[int]], temperature: float = 1.0) -> list[list[float]]:
        sequences = [list(tokens) for tokens in sequences]
        found = [[0.0] for _ in sequences]
        with torch.inference_mode():
            for run in pack([len(tokens) for tokens in sequences], self._train_section.micro_batch_tokens):
                batch = micro_batch([_whole(sequences[i], temperature or 1.0) for i in run], self._device)
                logprobs_N, _ = forward.policy_logprobs(self._model, batch)
                for row, logprob in zip(batch.rows_N.tolist(), logprobs_N.tolist(), strict=True):
                    found[run[row]].append(logprob)
        return found

    def export(self) -> list[memoryview | bytes]:
        dtype = getattr(torch, self._section.dtype)
        return [save_tensors({k: v.to(dtype).contiguous() for k, v in self._state().items()})]

    def save(self, folder: Path, *, epoch: int, receipts: Sequence[bytes] = ()) -> None:
        weights = self._state() | {name: master.detach() for name, master in self._masters.items()}
        files = {
            WEIGHTS: save_tensors({k: v.contiguous() for k, v in weights.items()}, {"format": "pt"}),
            OPTIMIZER: self._optimizer_image(),
            PROGRESS: msgspec.json.encode([self._rng.getstate(), torch.get_rng_state().tolist(), self._lr_steps]),
        }
        checkpoints.write(folder, files | self._described, step=self._step, epoch=epoch, receipts=receipts)

    def _update(self, sequences: list[TokenSequence], totals: dict[str, float], *, first: bool) -> float:
        """One optimiser step on the token-level mean loss of `sequences`; returns the gradient's norm before clipping.

        A norm that is not finite changes no weight: one such step would end every one of them.
        """
        section = self._train_section
        num_trained = sum(sum(s.trained) for s in sequences)
        self._optimizer.zero_grad(set_to_none=True)
        for run in pack([len(s.tokens) for s in sequences], section.micro_batch_tokens):
            batch = micro_batch([sequences[i] for i in run], self._device)
            logprobs_N, entropy_N = forward.policy_logprobs(self._model, batch)
            loss = clipped_policy_loss(
                logprobs_N,
                batch.behaviour_N,
                batch.advantages_N,
                clip_low=section.clip_low,
                clip_high=section.clip_high,
            )
            (loss.total / num_trained).backward()
            _add(totals, n=len(logprobs_N), entropy=entropy_N.sum(), clipped=loss.clipped, loss=loss.total.detach())
            if first:
                mismatch = ((batch.behaviour_N - logprobs_N.detach()) * batch.fresh_N).sum()
                _add(
                    totals,
                    first_n=len(logprobs_N),
                    ratio=loss.ratio,
                    kl=loss.kl,
                    fresh=batch.fresh_N.sum(),
                    mismatch=mismatch,
                )
        norm = torch.nn.utils.clip_grad_norm_(self._masters.values(), section.max_grad_norm)
        if norm.isfinite():
            self._optimizer.step()
            forward.take_masters(self._model, self._masters)
        return float(norm)

    def _learning_rate(self, step: int) -> float:
        """Linear warm-up, then linear decay to `lr_final` of the peak at the schedule's last step, and that from there on."""
        section = self._train_section
        warm = min(1.0, step / section.warmup_steps) if section.warmup_steps else 1.0
        done = min(1.0, (step - 1) / max(1, self._lr_steps - 1))
        return section.lr * warm * (1.0 - (1.0 - section.lr_final) * done)

    def _state(self) -> dict[str, torch.Tensor]:
        """Parameters by HF name as the model computes with them; a tied output head is left out, as HF does."""
        state = self._model.state_dict()
        if getattr(self._model.config, "tie_word_embeddings", False):
            state.pop("lm_head.weight", None)
        return state

    def _optimizer_image(self) -> bytes:
        tensors: dict[str, torch.Tensor] = {}
        for index, state in self._optimizer.state_dict()["state"].items():
            for name, value in state.items():
                tensors[f"{index}.{name}"] = torch.as_tensor(value).contiguous()
        return save_tensors(tensors)

    def _restore(self, optimizer: bytes, progress: bytes) -> None:
        state: dict[int, dict[str, torch.Tensor]] = {}
        for key, value in load_tensors(optimizer).items():
            index, name = key.split(".", 1)
            state.setdefault(int(index), {})[name] = value
        self._optimizer.load_state_dict({"state": state, "param_groups": self._optimizer.state_dict()["param_groups"]})
        python_state, torch_state, lr_steps = msgspec.json.decode(progress)
        self._lr_steps = self._train_section.lr_steps or lr_steps
        self._rng.setstate((python_state[0], tuple(python_state[1]), python_state[2]))
        torch.set_rng_state(torch.tensor(torch_state, dtype=torch.uint8))


def _whole(tokens: list[int], temperature: float) -> TokenSequence:
    """Every token of it counts as sampled; only what a forward pass reads is filled in."""
    size = len(tokens)
    return TokenSequence(tokens, [1] * size, [0.0] * size, [0] * size, 0.0, temperature)


def _advantaged(group: Sequence[Trajectory], version: int) -> list[TokenSequence]:
    advantages = group_advantages([t.reward for t in group])
    if not any(advantages):
        return []
    return [s for t, a in zip(group, advantages, strict=True) for s in sequences_of(t, a, version)]


def _add(totals: dict[str, float], **values: "float | torch.Tensor") -> None:
    for name, value in values.items():
        totals[name] = totals.get(name, 0.0) + float(value)


def _metrics(totals: dict[str, float], norm: float, lr: float) -> dict[str, float]:
    n = totals.get("n", 0.0) or 1.0
    first = totals.get("first_n", 0.0) or 1.0
    fresh = totals.get("fresh", 0.0) or 1.0
    return {
        "policy/loss": totals.get("loss", 0.0) / n,
        "policy/entropy": totals.get("entropy", 0.0) / n,
        "policy/kl": totals.get("kl", 0.0) / first,
        "policy/mismatch_kl": totals.get("mismatch", 0.0) / fresh,
        "policy/ratio_mean": totals["ratio"] / first if "ratio" in totals else 1.0,
        "policy/clip_frac": totals.get("clipped", 0.0) / n,
        "optim/grad_norm": norm,
        "optim/lr": lr,
    }


def _reward_metrics(groups: Sequence[Sequence[Trajectory]]) -> dict[str, float]:
    rewards = torch.tensor([t.reward for group in groups for t in group], dtype=torch.float64)
    flat = sum(1 for group in groups if not any(group_advantages([t.reward for t in group])))
    return {
        "reward/mean": float(rewards.mean()),
        "reward/std": float(rewards.std()) if len(rewards) > 1 else 0.0,
        "reward/zero_std_frac": flat / len(groups),
    }
