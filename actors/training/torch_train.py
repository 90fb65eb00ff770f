"""One rank of training: a transformers model, AdamW, and one step at a time."""

import itertools
import math
import random
from collections.abc import Callable, Generator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors

from rubato.actors.checkpoints import checkpoint as checkpoints
from rubato.actors.checkpoints.model_folder import ADAPTER_CONFIG, files_beside_weights, pick_device
from rubato.actors.cluster.lease import finished
from rubato.actors.config import ModelSection, TrainSection
from rubato.actors.messages.samples import Trajectory, has_spread
from rubato.actors.training import forward
from rubato.actors.training.forward import Row, packs, row_of
from rubato.actors.training.losses import Figures, Objective, Policies
from rubato.actors.training.train_engine import StepResult, TrainError
from rubato.bus.message import unpack_f32, unpack_i32, unpack_u8


class TokenSequence(NamedTuple):
    """One context to train on. Lists of equal length T; `trained` is 1 where the token was sampled by the policy."""

    tokens: list[int]
    trained: list[int]
    behaviour: list[float]
    fresh: list[int]
    """1 where the token was sampled under the weights that are being updated."""
    advantage: float
    length: int
    """Trained tokens of the whole trajectory."""
    temperature: float = 1.0
    """Of the distribution that its log-probabilities are of."""
    weight: float = 1.0
    """What each of its tokens counts in the minibatch's loss."""
    share: float = 0.0
    """Its tokens, of all tokens of the minibatch."""

    @property
    def num_trained(self) -> int:
        """Trained tokens: a sampled first token has nothing before it to predict it from, and is left out."""
        return sum(self.trained[1:])


class MicroBatch(NamedTuple):
    """Sequences of L tokens, end to end. `places_N` point at the token *before* each of the N trained ones, `rows_N` at its sequence."""

    tokens_L: torch.Tensor
    row: Row
    rows_N: torch.Tensor
    places_N: torch.Tensor
    targets_N: torch.Tensor
    behaviour_N: torch.Tensor
    advantages_N: torch.Tensor
    fresh_N: torch.Tensor
    temperatures_N: torch.Tensor
    weights_N: torch.Tensor
    shares_S: torch.Tensor
    """Of all tokens of the minibatch those of each sequence."""
    start_N: torch.Tensor | None = None
    """Log-probabilities under the policy that the step began with, where they were recomputed."""


def sequences_of(trajectory: Trajectory, advantage: float, version: int) -> list[TokenSequence]:
    """A trajectory's segments. `version` is the weight version the update starts from."""
    found: list[TokenSequence] = []
    temperature = trajectory.temperature or 1.0  # a greedy choice has log-probabilities, and they are of temperature 1
    length = sum(segment.mask.count(1, 1) for segment in trajectory.segments)
    for segment in trajectory.segments:
        tokens = unpack_i32(segment.tokens)
        fresh = [0] * len(tokens)
        for span in segment.spans:
            if span.version == version:
                fresh[span.start : span.end] = [1] * (span.end - span.start)
        mask, behaviour = unpack_u8(segment.mask), unpack_f32(segment.logprobs)
        found.append(TokenSequence(tokens, mask, behaviour, fresh, advantage, length, temperature))
    return found


def pack(lengths: Sequence[int], max_tokens: int, *, padded: bool = False) -> list[list[int]]:
    """Indices of `lengths`, longest first, cut into runs of at most `max_tokens`: of tokens, or `padded` of count × longest.

    Every index appears exactly once; a sequence longer than `max_tokens` makes a run of its own.
    """
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    runs: list[list[int]] = []
    size = 0
    for index in order:
        size += lengths[runs[-1][0]] if runs and padded else lengths[index]
        if runs and size <= max_tokens:
            runs[-1].append(index)
        else:
            runs.append([index])
            size = lengths[index]
    return runs


def micro_batch(sequences: Sequence[TokenSequence], device: torch.device) -> MicroBatch:
    """Join and index. Of no sequence it is a token from which nothing is learned."""
    row = row_of([len(s.tokens) for s in sequences] or [1], device)
    begins = [0, *itertools.accumulate(row.lengths)]
    places = [(number, i, s) for number, s in enumerate(sequences) for i, trained in enumerate(s.trained) if trained and i]

    def floats(values: list[float]) -> torch.Tensor:
        return torch.tensor(values, device=device, dtype=torch.float32)

    def ints(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, device=device, dtype=torch.int64)

    return MicroBatch(
        ints([token for s in sequences for token in s.tokens] or [0]),
        row,
        ints([number for number, _, _ in places]),
        ints([begins[number] + i - 1 for number, i, _ in places]),
        ints([s.tokens[i] for _, i, s in places]),
        floats([s.behaviour[i] for _, i, s in places]),
        floats([s.advantage for _, _, s in places]),
        floats([s.fresh[i] for _, i, s in places]),
        floats([s.temperature for _, _, s in places]),
        floats([s.weight for _, _, s in places]),
        floats([s.share for s in sequences] or [0.0]),
    )


WEIGHTS, OPTIMIZER, PROGRESS = "model.safetensors", "optimizer.state", "trainer.json"
"""Files of a checkpoint. A second *.safetensors would pass for weights where the checkpoint is the base of another run."""

OWN_FILES = {OPTIMIZER, PROGRESS, checkpoints.MANIFEST, checkpoints.RECEIPTS}
"""What makes a model folder a checkpoint; everything else in it describes the model."""


class TorchTrainEngine:
    """One rank. Not thread-safe: the Trainer calls it from one offloaded call at a time."""

    num_ranks = 1
    wide = "float32"
    """Type of what is not to be narrow."""
    _is_own_reference = False
    """The base model can be computed out of the one that is trained."""

    def __init__(self, model: ModelSection, train: TrainSection, *, steps: int, seed: int) -> None:
        self._section = model
        self._train_section = train
        self._lr_steps = train.lr_steps or steps
        self._rng = random.Random(seed)
        self._objective = Objective(train)
        self._model: Any = None
        self._reference: Any = None
        self._masters: dict[str, torch.nn.Parameter] = {}
        self._optimizer: torch.optim.Optimizer
        self._image: forward.WeightsImage
        self._told: dict[str, str] = {}
        """What each published image says of itself."""
        self._described: dict[str, bytes] = {}
        self._step = 0
        self._within_step = False
        """Gradients are of a step that goes on."""
        torch.set_num_threads(model.torch_threads)
        torch.manual_seed(seed)
        # cuDNN plans its attention anew for each shape, and micro-batches have as many as there are lengths.
        torch.backends.cuda.enable_cudnn_sdp(False)
        self._device = torch.device(pick_device(model.device, torch.cuda.device_count()))

    def load(self, model_dir: Path, checkpoint: Path | None) -> tuple[int, int]:
        """(step, term) of what was loaded; (0, 0) for a base model."""
        source = checkpoint or model_dir
        if not any(source.glob("*.safetensors")):
            raise TrainError(f"model folder {source} has no *.safetensors. Set model.path to a folder in HF format.")
        manifest = self._manifest(checkpoint) if checkpoint else None
        section = self._train_section
        narrow = (self._section.dtype if section.dtype == "model" else section.dtype) == "bfloat16"
        self._model = self._trained_model(model_dir, checkpoint, section.master_dtype if narrow else self.wide, narrow=narrow)
        if section.gradient_checkpointing:
            forward.checkpoint_layers(self._model)
        if section.router_aux_coef and (mixture := forward.mixture_of(self._model)):
            mixture.watch_routers()
        self._masters = self._placed(narrow=narrow)
        # Held, not copied at each save: the checkpoint they come from is pruned some steps later.
        self._described = {k: v for k, v in files_beside_weights(source).items() if k not in OWN_FILES}
        if section.kl_coef and (section.reference or not self._is_own_reference):
            reference = Path(section.reference) if section.reference else model_dir
            self._reference = self._read(reference, "bfloat16" if narrow else self.wide)
            if self._reference.config.vocab_size != self._model.config.vocab_size:
                raise TrainError(f"reference model {reference} has another vocabulary than the policy model.")
            self._place_reference()
        self._optimizer = self._new_optimizer()
        if manifest is None:
            return 0, 0
        self._restore_optimizer(source / OPTIMIZER)
        self._restore_progress((source / PROGRESS).read_bytes())
        self._step = manifest.step
        return manifest.step, manifest.term

    def _manifest(self, checkpoint: Path) -> checkpoints.Manifest:
        return checkpoints.check(checkpoint)

    def _read(self, folder: Path, dtype: str) -> Any:
        return forward.read_model(folder, dtype, self._device)

    def _placed(self, *, narrow: bool) -> dict[str, torch.nn.Parameter]:
        """Bring the model that was read into the form that it is trained in; returns the weights that the optimiser moves, by name."""
        masters = forward.masters_of(self._model, torch.bfloat16 if narrow else getattr(torch, self.wide))
        self._image = forward.WeightsImage(self._state(), getattr(torch, self._section.dtype), self._told)
        return masters

    def _place_reference(self) -> None:
        """The same for the reference model."""

    def _new_optimizer(self) -> torch.optim.Optimizer:
        section = self._train_section
        return torch.optim.AdamW(self._masters.values(), lr=section.lr, betas=section.betas, weight_decay=section.weight_decay, fused=True)

    def train(self, step: int, groups: Sequence[Sequence[Trajectory]]) -> StepResult:
        return finished(self.parts(step, groups))

    def parts(self, step: int, groups: Sequence[Sequence[Trajectory]]) -> Generator[None, None, StepResult]:
        """One update from version step - 1 to step; `train.minibatches` optimiser steps over whole groups. A part is a micro-batch."""
        self._within_step = True
        lr = self._learning_rate(step)
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        useful, taught_frac = self._useful(groups, step - 1)
        self._rng.shuffle(useful)
        # Minibatches keep their size: late in training few groups have spread, and updates on two of them are noise.
        count = max(1, math.ceil(self._train_section.minibatches * len(useful) / len(groups)))
        minibatches = [[s for group in useful[index::count] for s in group] for index in range(count)]
        figures, num_skipped, num_updates, norm = Figures(), 0, 0, 0.0
        updates = [self._micro_batches(sequences) for sequences in minibatches if sequences]
        if self._train_section.proximal == "recomputed":
            for batches in updates[1:]:
                for index, batch in enumerate(batches):
                    yield
                    batches[index] = self._with_start(batch)
        for index, batches in enumerate(updates):
            norm = yield from self._update(batches, figures, first=index == 0)
            num_skipped += not math.isfinite(norm)
            num_updates += math.isfinite(norm) and norm > 0
        self._step = step
        self._within_step = False
        measured = {
            "policy/taught_frac": taught_frac, "optim/grad_norm": norm, "optim/lr": lr,
            "optim/minibatches": len(updates), "optim/updates": num_updates, "optim/skipped": num_skipped,
        }  # fmt: skip
        num_tokens = sum(len(s.tokens) for sequences in minibatches for s in sequences)
        return StepResult(self._whole(figures).metrics() | measured | _reward_metrics(groups), num_tokens)

    def logprobs(self, sequences: Sequence[Sequence[int]], temperature: float = 1.0) -> list[list[float]]:
        sequences = [list(tokens) for tokens in sequences]
        found = [[0.0] for _ in sequences]
        with torch.inference_mode():
            for run in self._packed([len(tokens) for tokens in sequences]):
                batch = micro_batch([sampled(sequences[i], temperature or 1.0) for i in run], self._device)
                logprobs_N = self._forward(self._model, batch).logprobs_N
                for row, logprob in zip(batch.rows_N.tolist(), logprobs_N.tolist(), strict=True):
                    found[run[row]].append(logprob)
        return found

    def image_bytes(self) -> int:
        return self._image.size_bytes

    def export(self, memory: memoryview) -> Callable[[], None]:
        return self._image.write(self._state(), memory)

    def sleep(self) -> None:
        if not self._within_step:
            self._optimizer.zero_grad(set_to_none=True)
        self._move(torch.device("cpu"))
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def wake(self) -> None:
        self._move(self._device)

    def _move(self, device: torch.device) -> None:
        for model in filter(None, (self._model, self._reference)):
            model.to(device)
        for master in self._masters.values():
            grad, master.grad = master.grad, None
            master.data = master.data.to(device)
            master.grad = None if grad is None else grad.to(device)
        for state in self._optimizer.state.values():
            state.update({name: value.to(device) for name, value in state.items() if isinstance(value, torch.Tensor)})

    def snapshot(self, *, term: int, receipts: Sequence[bytes] = ()) -> Callable[[Path], None]:
        self._image.check()
        files = self._weight_files() | {
            OPTIMIZER: save_tensors({k: v.contiguous() for k, v in self._optimizer_tensors().items()}),
            PROGRESS: self._progress(),
        }
        return partial(checkpoints.write, files=self._described | files, step=self._step, term=term, receipts=receipts)

    def _trained_model(self, model_dir: Path, checkpoint: Path | None, dtype: str, *, narrow: bool) -> Any:
        """The model as it is trained: what has a gradient is what an optimiser moves, as `dtype`. `narrow`: it computes in bfloat16."""
        if checkpoint is not None and (checkpoint / ADAPTER_CONFIG).exists():
            raise TrainError(
                f"checkpoint {checkpoint} holds an adapter: set train.lora as its run had it, or start another run with --force."
            )
        return self._read(checkpoint or model_dir, dtype)

    def _weight_files(self) -> dict[str, bytes]:
        """What a checkpoint holds of what was trained."""
        return {WEIGHTS: save_tensors({k: v.contiguous() for k, v in self._kept().items()}, {"format": "pt"})}

    def _useful(self, groups: Sequence[Sequence[Trajectory]], version: int) -> tuple[list[list[TokenSequence]], float]:
        """The groups that have something to teach, or to keep near the reference: their sequences with their advantages.

        And the share of all groups whose advantages are not 0, whatever is left of them to train on.
        """
        section = self._train_section
        penalty = section.overlong_penalty if section.overlong == "penalty" else 0.0
        rewards = [[t.reward - penalty * t.cut for t in group] for group in groups]
        found: list[list[TokenSequence]] = []
        num_taught = 0
        for group, advantages in zip(groups, self._objective.advantages(rewards), strict=True):
            num_taught += any(advantages)
            if any(advantages) or section.kl_coef:
                kept = [(t, a) for t, a in zip(group, advantages, strict=True) if section.overlong != "mask" or not t.cut]
                found.append([s for t, a in kept for s in sequences_of(t, a, version) if s.num_trained])
        return [sequences for sequences in found if sequences], num_taught / len(groups)

    def _micro_batches(self, sequences: Sequence[TokenSequence]) -> list[MicroBatch]:
        """A minibatch, cut: its tokens' weights are of the whole."""
        weights = self._objective.weights([s.num_trained for s in sequences], [s.length for s in sequences])
        num = sum(len(s.tokens) for s in sequences)
        weighed = [s._replace(weight=weight, share=len(s.tokens) / num) for s, weight in zip(sequences, weights, strict=True)]
        return [micro_batch([weighed[i] for i in run], self._device) for run in self._runs([len(s.tokens) for s in weighed])]

    def _runs(self, lengths: Sequence[int]) -> list[list[int]]:
        """Which of the sequences are computed here, and which of them together."""
        return self._packed(lengths)

    def _packed(self, lengths: Sequence[int]) -> list[list[int]]:
        return pack(lengths, self._train_section.micro_batch_tokens, padded=not packs(self._model))

    def _forward(self, model: Any, batch: MicroBatch) -> forward.Computed:
        """Log-probabilities and entropies of the trained tokens, and the imbalance of experts."""
        return forward.policy_logprobs(model, batch)

    def _whole(self, figures: Figures) -> Figures:
        """Those of all tokens of the step."""
        return figures

    def _with_start(self, batch: MicroBatch) -> MicroBatch:
        with torch.no_grad():
            return batch._replace(start_N=self._forward(self._model, batch).logprobs_N)

    def _update(self, batches: Sequence[MicroBatch], figures: Figures, *, first: bool) -> Generator[None, None, float]:
        """One optimiser step on a minibatch; returns the gradient's norm before clipping.

        A norm that is not finite changes no weight: one such step would end every one of them.
        """
        self._optimizer.zero_grad(set_to_none=True)
        figures.num_updates += 1
        for batch in batches:
            yield
            found = self._forward(self._model, batch)
            logprobs_N = found.logprobs_N
            figures.add(entropy=found.entropy_N.sum())
            reference_N = None
            if self._train_section.kl_coef:
                with torch.no_grad():
                    reference_N = self._reference_logprobs(batch)
            policies = Policies(logprobs_N, logprobs_N.detach() if first else batch.start_N, reference_N)
            loss = self._loss(batch, policies, figures)
            if found.imbalance is not None:
                loss = loss + self._train_section.router_aux_coef * found.imbalance
                figures.add(router_imbalance=found.imbalance.detach())
            loss.backward()
        norm = self._clip()
        if norm.isfinite():
            self._optimizer.step()
            self._moved()
        return float(norm)

    def _reference_logprobs(self, batch: MicroBatch) -> torch.Tensor:
        return self._forward(self._reference, batch).logprobs_N

    def _loss(self, batch: MicroBatch, policies: Policies, figures: Figures) -> torch.Tensor:
        return self._objective.loss(batch, policies, figures)

    def _clip(self) -> torch.Tensor:
        """Scale the gradients down to `max_grad_norm`; returns their norm before."""
        return torch.nn.utils.clip_grad_norm_(self._masters.values(), self._train_section.max_grad_norm)

    def _moved(self) -> None:
        """The optimiser has moved the weights."""
        forward.take_masters(self._model, self._masters)

    def _learning_rate(self, step: int) -> float:
        """Linear warm-up, then linear decay to `lr_final` of the peak at the schedule's last step, and that from there on."""
        section = self._train_section
        warm = min(1.0, step / section.warmup_steps) if section.warmup_steps else 1.0
        done = min(1.0, (step - 1) / max(1, self._lr_steps - 1))
        return section.lr * warm * (1.0 - (1.0 - section.lr_final) * done)

    def _state(self) -> dict[str, torch.Tensor]:
        """Parameters by HF name as the model computes with them; a tied output head is left out, as HF does."""
        return self._named(self._held())

    def _named(self, held: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """As a checkpoint names them: experts one by one."""
        mixture = forward.mixture_of(self._model)
        return held if mixture is None else mixture.apart(held)

    def _held(self) -> dict[str, torch.Tensor]:
        """The same as the model holds them: the experts of a layer in one."""
        state = self._model.state_dict()
        if getattr(self._model.config, "tie_word_embeddings", False):
            state.pop("lm_head.weight", None)
        return state

    def _kept(self) -> dict[str, torch.Tensor]:
        """What a checkpoint has as the weights, by HF name: those that the optimiser moves."""
        return self._named(self._held() | {name: master.detach() for name, master in self._masters.items()})

    def _optimizer_tensors(self) -> dict[str, torch.Tensor]:
        """The optimiser's state by `INDEX.NAME`, INDEX being the place of a weight among the masters."""
        states: dict[int, dict[str, Any]] = self._optimizer.state_dict()["state"]
        return {f"{index}.{name}": torch.as_tensor(value) for index, state in states.items() for name, value in state.items()}

    def _progress(self) -> bytes:
        return msgspec.json.encode([self._rng.getstate(), torch.get_rng_state().tolist(), self._lr_steps])

    def _restore_optimizer(self, path: Path) -> None:
        state: dict[int, dict[str, torch.Tensor]] = {}
        for key, value in load_tensors(path.read_bytes()).items():
            index, name = key.split(".", 1)
            state.setdefault(int(index), {})[name] = value
        self._optimizer.load_state_dict({"state": state, "param_groups": self._optimizer.state_dict()["param_groups"]})

    def _restore_progress(self, progress: bytes) -> None:
        python_state, torch_state, lr_steps = msgspec.json.decode(progress)
        self._lr_steps = self._train_section.lr_steps or lr_steps
        self._rng.setstate((python_state[0], tuple(python_state[1]), python_state[2]))
        torch.set_rng_state(torch.tensor(torch_state, dtype=torch.uint8))


def sampled(tokens: list[int], temperature: float) -> TokenSequence:
    """Every token of it counts as sampled; only what a forward pass reads is filled in."""
    size = len(tokens)
    return TokenSequence(tokens, [1] * size, [0.0] * size, [0] * size, 0.0, size, temperature)


def _reward_metrics(groups: Sequence[Sequence[Trajectory]]) -> dict[str, float]:
    rewards = torch.tensor([t.reward for group in groups for t in group], dtype=torch.float64)
    flat = sum(not has_spread([t.reward for t in group]) for group in groups)
    return {
        "reward/mean": float(rewards.mean()),
        "reward/std": float(rewards.std()) if len(rewards) > 1 else 0.0,
        "reward/zero_std_frac": flat / len(groups),
    }
