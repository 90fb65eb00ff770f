"""Tinker's operations on adapters of a transformers model."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import torch
from pydantic import ValidationError
from safetensors.torch import load as load_tensors

from rubato.actors.adapters import shapes
from rubato.actors.adapters.bank import MOST, AdapterBank
from rubato.actors.adapters.stepwise import AdamStep, Scores
from rubato.actors.checkpoints.model_folder import EMBED
from rubato.actors.config import LoraSection, ModelSection, TrainSection
from rubato.actors.gateway.tinker.data import require_loss, sequences_of, tokens_of
from rubato.actors.gateway.tinker.losses import loss_of
from rubato.actors.messages.tinker import Begin, Computed, ForwardBackward, OptimStep, Scored
from rubato.actors.training.forward import WeightsImage
from rubato.actors.training.train_engine import TrainError
from rubato.actors.weights.transport import WeightsSource

ALPHA = 32.0
"""Of every adapter, as the service has it: the learning rate that is right for one rank is right for others. Source: LoRA Without Regret
(Thinking Machines Lab, 2025), its parametrization."""

ATTENTION, MLP = ("q_proj", "k_proj", "v_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj")

BASE, GUEST = "base", "guest"
"""Adapters that are held for a moment: while the base model is loaded, and of a folder while it is asked something."""

MOST_TOP = 1024


class TorchModels:
    """TunedModels of an AdapterBank."""

    most = MOST - 1
    """One place is the guest's."""

    def __init__(self, model: ModelSection, train: TrainSection, model_dir: Path, folder: Path, budget_bytes: int) -> None:
        self._model, self._model_dir = model, model_dir
        self._train = train.model_copy(update={"kl_coef": 0.0, "router_aux_coef": 0.0, "reference": "", "lora": None})
        self._bank = AdapterBank(model, model_dir, folder, budget_bytes=budget_bytes)
        self._shapes: Mapping[str, tuple[int, ...]] = {}
        self._vocab_size = self._most_tokens = 0

    def load(self) -> None:
        try:
            self._shapes = shapes.shapes_in(self._model_dir)
            told = msgspec.json.decode((self._model_dir / "config.json").read_bytes(), type=dict[str, Any])
        except (OSError, ValueError) as error:
            raise TrainError(f"model folder {self._model_dir} can't be read: {error}") from error
        told = told.get("text_config", told)
        self._vocab_size = self._shapes[EMBED][0] if EMBED in self._shapes else int(told["vocab_size"])
        self._most_tokens = int(told.get("max_position_embeddings") or 1 << 20)
        self._begin(BASE, Begin(BASE, 1))
        self._bank.drop(BASE)

    # -- operations ---------------------------------------------------------------------------------------------------

    def begin(self, model: str, begin: Begin) -> None:
        with _memory():
            self._begin(_held(model), begin)

    def _begin(self, name: str, begin: Begin) -> None:
        self._bank.add(name, self._train.model_copy(update={"lora": self._lora(begin)}), steps=1, seed=begin.seed)
        with ExitStack() as undo:
            undo.callback(self._bank.drop, name)
            if begin.start:
                self._bank.set_to(name, Path(begin.start), optimizer=begin.optimizer)
            undo.pop_all()

    def _lora(self, begin: Begin) -> LoraSection:
        """Modules by the end of their name where they have it in every layer, else those that aren't experts."""
        ends = (ATTENTION if begin.train_attn else ()) + (MLP if begin.train_mlp else ())
        modules = [name.removesuffix(".weight") for name, shape in self._shapes.items() if name.endswith(".weight") and len(shape) == 2]
        named = [name for name in modules if name.rpartition(".")[2] in ends]
        plain = [name for name in named if ".experts." not in name]
        if not plain:
            raise TrainError("nothing is left to train: neither train_attn nor train_mlp is set, and the output head gets no adapter here")
        kinds = tuple(end for end in ends if any(name.rpartition(".")[2] == end for name in plain))
        try:
            return LoraSection(rank=begin.rank, alpha=ALPHA, targets=kinds if plain == named else tuple(plain))
        except ValidationError as error:
            raise TrainError(f"rank={begin.rank} can't be: {error.errors()[0]['msg']}") from None

    def drop(self, model: str) -> None:
        self._bank.drop(_held(model))

    def forward_backward(self, model: str, operation: ForwardBackward) -> Computed:
        loss = require_loss(operation)
        sequences = sequences_of(operation, vocab_size=self._vocab_size, most_tokens=self._most_tokens)
        with _memory():
            seen = self._bank.add_gradient(_held(model), sequences, loss_of(loss), backward=not operation.forward_only)
        total = sum(float(each.losses.double().sum()) for each in seen)
        return Computed(tuple(_bytes(s.logprobs) for s in seen), tuple(_bytes(s.losses) for s in seen), {"loss:sum": total})

    def optim_step(self, model: str, operation: OptimStep) -> Mapping[str, float]:
        step = _step(operation)
        with _memory():
            norm = self._bank.take_step(_held(model), step)
        return {"grad_norm": norm} if norm < torch.inf else {"skipped": 1.0}

    def files(self, model: str, *, optimizer: bool, gradient: bool = False) -> Mapping[str, bytes]:
        return self._bank.files(_held(model), optimizer=optimizer, gradient=gradient)

    def set_to(self, model: str, folder: Path, *, optimizer: bool, gradient: bool = False) -> None:
        self._bank.set_to(_held(model), folder, optimizer=optimizer, gradient=gradient)

    # -- what others see ----------------------------------------------------------------------------------------------

    def source(self, model: str) -> WeightsSource:
        return self._bank.source(_held(model))

    def source_of(self, folder: Path) -> "FolderSource":
        try:
            _, image = shapes.read_adapter(folder)
            told = shapes.told_of(image)
            shapes.require_base(told, shapes.base_of(self._model_dir), f"the adapter in {folder}")
        except (shapes.AdapterError, ValueError) as error:
            raise TrainError(str(error)) from error
        return FolderSource(load_tensors(bytes(image)), getattr(torch, self._model.dtype), told)

    def score(self, tokens: bytes, *, model: str = "", folder: Path | None = None, top: int = 0) -> Scored:
        if not 0 <= top <= min(MOST_TOP, self._vocab_size):
            raise TrainError(f"the {top} likeliest tokens can't be told: ask for up to {min(MOST_TOP, self._vocab_size)}")
        try:
            sequence = tokens_of(tokens, vocab_size=self._vocab_size, most_tokens=self._most_tokens)
        except ValueError as error:
            raise TrainError(f"the prompt: {error}") from None
        with _memory():
            if folder is None:
                return _scored(self._bank.score(_held(model) if model else "", sequence, top))
            config, _ = _read(folder)
            targets = tuple(config.target_modules or ()) if isinstance(config.target_modules, list) else ()
            lora = LoraSection(rank=config.r, alpha=config.lora_alpha, targets=targets, start=str(folder))
            self._bank.add(GUEST, self._train.model_copy(update={"lora": lora}), steps=1, seed=0)
            try:
                return _scored(self._bank.score(GUEST, sequence, top))
            finally:
                self._bank.drop(GUEST)


class FolderSource:
    """WeightsSource of an adapter's tensors, which stay as they are."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype, told: Mapping[str, str]) -> None:
        self._tensors, self._image = tensors, WeightsImage(tensors, dtype, told)

    def image_bytes(self) -> int:
        return self._image.size_bytes

    def export(self, memory: memoryview) -> Callable[[], None]:
        return self._image.write(self._tensors, memory)


def _held(model: str) -> str:
    """The bank's name of a model: never one of its own."""
    return f"model:{model}"


def _read(folder: Path) -> tuple[shapes.PeftConfig, memoryview]:
    try:
        return shapes.read_adapter(folder)
    except shapes.AdapterError as error:
        raise TrainError(str(error)) from error


def _step(operation: OptimStep) -> AdamStep:
    most = torch.finfo(torch.float32).max
    wanted = {
        "learning_rate": 0 <= operation.learning_rate <= most,
        "beta1": 0 <= operation.beta1 < 1,
        "beta2": 0 <= operation.beta2 < 1,
        "eps": 0 <= operation.eps <= most,
        "weight_decay": 0 <= operation.weight_decay <= most,
        "grad_clip_norm": 0 <= operation.grad_clip_norm <= most,
    }
    if wrong := next((name for name, holds in wanted.items() if not holds), ""):
        raise TrainError(f"adam_params.{wrong}={getattr(operation, wrong)} can't be")
    betas = (operation.beta1, operation.beta2)
    return AdamStep(operation.learning_rate, betas, operation.eps, operation.weight_decay, operation.grad_clip_norm)


def _bytes(values: torch.Tensor) -> bytes:
    return values.contiguous().numpy().tobytes()


def _scored(scores: Scores) -> Scored:
    ids = scores.top_ids.to(torch.int32)
    return Scored(_bytes(scores.logprobs), _bytes(ids), _bytes(scores.top_logprobs.float()))


@contextmanager
def _memory() -> Iterator[None]:
    """A device that is out of memory raises MemoryError."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        torch.cuda.empty_cache()
        raise MemoryError(f"the device is out of memory: {str(error).splitlines()[0]}") from error
