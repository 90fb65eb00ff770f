"""Training of an adapter: peft's low-rank layers within a model that itself stays as it is."""

import warnings
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors

from rubato.actors.adapters import shapes
from rubato.actors.adapters.stepwise import AdamStep, SumLoss, TargetSequence, TargetsSeen, add_gradient, take_step
from rubato.actors.checkpoints.model_folder import ADAPTER_CONFIG
from rubato.actors.config import LoraSection, ModelSection, TrainSection
from rubato.actors.training import forward
from rubato.actors.training.losses import Figures
from rubato.actors.training.torch_train import OPTIMIZER, MicroBatch, TorchTrainEngine
from rubato.actors.training.train_engine import TrainError

NAME = "policy"
"""What peft calls the adapter within the model."""

GRADIENTS = "gradients.state"
"""File of an adapter that was put aside while a gradient waits."""


class LoraTrainEngine(TorchTrainEngine):
    """One rank. What it exports and saves is the adapter; the reference of the KL divergence is the model without it."""

    _is_own_reference = True

    def __init__(
        self, model: ModelSection, train: TrainSection, *, steps: int, seed: int, name: str = NAME, beside: "LoraTrainEngine | None" = None
    ) -> None:
        """`beside`: over the base model of that one, which has loaded it; each has a `name` of its own there."""
        super().__init__(model, train, steps=steps, seed=seed)
        assert train.lora is not None
        self._lora: LoraSection = train.lora
        self._scaled = shapes.Scaled(train.lora.rank, train.lora.alpha)
        self.name = name
        self._beside = beside
        self._base = Path()
        self._settled_bytes = self._gradient_bytes = 0
        self.waits = False
        """A gradient has gathered that no step took yet."""

    def _trained_model(self, model_dir: Path, checkpoint: Path | None, dtype: str, *, narrow: bool) -> Any:
        """The base model without a gradient, and layers of low rank in it: new ones add nothing."""
        start = checkpoint or (Path(self._lora.start) if self._lora.start else None)
        try:
            if start is not None:
                shapes.check_start(start, model_dir, self._lora)
            modules = shapes.target_modules(shapes.shapes_in(model_dir), self._lora.targets)
            base = shapes.base_of(model_dir)
        except (shapes.AdapterError, ValueError) as error:
            raise TrainError(str(error)) from error
        self._base, self._told = model_dir, shapes.telling(self._scaled, base)
        if self._beside is None:
            model = forward.read_model(model_dir, "bfloat16" if narrow else "float32", self._device)
        else:
            model = self._beside._model
        put_in(model, self.name, self._lora, tuple(modules))
        model.requires_grad_(False)
        for parameter in tensors_in(model, self.name).values():
            parameter.requires_grad_(True)
            parameter.data = parameter.data.to(getattr(torch, dtype))
        expected = shapes.adapter_shapes(modules, self._lora.rank)
        if missing := expected.keys() ^ tensors_in(model, self.name).keys():
            raise TrainError(f"peft gave {type(model).__name__} other adapters than its folder has modules: {sorted(missing)[0]}")
        if start is not None:
            fill(tensors_in(model, self.name), load_tensors((start / shapes.WEIGHTS).read_bytes()))
        return model

    def _state(self) -> dict[str, torch.Tensor]:
        """The adapter's tensors as peft's files call them."""
        return {name: parameter.detach() for name, parameter in tensors_in(self._model, self.name).items()}

    def _weight_files(self) -> dict[str, bytes]:
        tensors = {name: master.detach().contiguous() for name, master in self._named_masters().items()}
        return {shapes.WEIGHTS: save_tensors(tensors, self._told), ADAPTER_CONFIG: shapes.config_image(self._lora, self._base)}

    def load(self, model_dir: Path, checkpoint: Path | None) -> tuple[int, int]:
        stands_at = super().load(model_dir, checkpoint)
        moved, computed = {id(m): m for m in self._masters.values()}, {id(p): p for p in tensors_in(self._model, self.name).values()}
        self._gradient_bytes = sum(m.nbytes for m in moved.values())
        self._settled_bytes = 2 * self._gradient_bytes + sum(each.nbytes for each in (moved | computed).values())
        if self._beside is not None:  # a tokenizer is held once, not for each adapter
            theirs = self._beside._described
            self._described = {name: theirs[name] if theirs.get(name) == file else file for name, file in self._described.items()}
            self._beside = None
        return stands_at

    @property
    def held_bytes(self) -> int:
        """Of the adapter, as it is moved and as it is computed with, of the two moments that AdamW has of it from its first step on, and of the
        gradient that waits."""
        return self._settled_bytes + self.waits * self._gradient_bytes

    @property
    def version(self) -> int:
        """Steps that it has had."""
        return self._step

    @property
    def model(self) -> Any:
        """The base model, with the layers of all adapters that share it."""
        return self._model

    def let_learn(self) -> None:
        """Its tensors have a gradient, which one that was begun beside it took from them."""
        for parameter in tensors_in(self._model, self.name).values():
            parameter.requires_grad_(True)

    def remove(self) -> None:
        """Take this adapter's layers out of the model, however far `load` came, and free its memory."""
        model = self._beside.model if self._model is None and self._beside is not None else self._model
        if model is not None:
            for layer in layers_of(model):
                layer._active_adapter = [name for name in layer.active_adapters if name != self.name]  # else peft takes others' gradients
                layer.delete_adapter(self.name)
            getattr(model, "peft_config", {}).pop(self.name, None)
        self._masters = {}
        vars(self).pop("_optimizer", None)

    def drop_gradients(self) -> None:
        """Those of the last step, which the next would drop, and those that wait."""
        self._optimizer.zero_grad(set_to_none=True)
        self.waits = False

    def add_gradient(self, sequences: Sequence[TargetSequence], loss: SumLoss, *, backward: bool) -> list[TargetsSeen]:
        """As in stepwise.py, with the adapter that is active."""
        size = self._train_section.micro_batch_tokens
        masters = [*self._masters.values()]
        seen = add_gradient(self._model, masters, sequences, loss, micro_batch_tokens=size, backward=backward)
        self.waits = self.waits or backward
        return seen

    def take_step(self, step: AdamStep) -> float:
        """The next one, with the gradient that waits; returns its norm. One that isn't finite moves nothing, and counts as a step."""
        norm = take_step(self._optimizer, [*self._masters.values()], step)
        self._moved()
        self.drop_gradients()
        self._step += 1
        return norm

    def files(self, *, optimizer: bool, gradient: bool = False) -> dict[str, bytes]:
        """Of a folder in peft's format, from which `set_to` goes on: with the optimiser, and with the gradient that waits."""
        found = self._weight_files()
        if optimizer:
            found[OPTIMIZER] = save_tensors({name: tensor.contiguous() for name, tensor in self._optimizer_tensors().items()})
        if gradient and self.waits:
            waiting = {name: master.grad for name, master in self._named_masters().items() if master.grad is not None}
            found[GRADIENTS] = save_tensors({name: grad.contiguous() for name, grad in waiting.items()})
        return found

    def set_to(self, folder: Path, *, optimizer: bool, gradient: bool = False) -> None:
        """Be what `files` gave; what is not asked for begins anew. Blocks.

        Raises TrainError where the folder is not of this adapter's rank, targets and base model, and OSError; then nothing changed.
        """
        try:
            shapes.check_start(folder, self._base, self._lora)
        except shapes.AdapterError as error:
            raise TrainError(str(error)) from error
        if optimizer and not (folder / OPTIMIZER).exists():
            raise TrainError(f"{folder} holds no optimiser: it was saved to sample from")
        values = load_tensors((folder / shapes.WEIGHTS).read_bytes())
        waiting = load_tensors((folder / GRADIENTS).read_bytes()) if gradient and (folder / GRADIENTS).exists() else {}
        if optimizer:
            self._restore_optimizer(folder / OPTIMIZER)
        else:
            self._optimizer.state.clear()
        self.drop_gradients()
        self._fill(values, waiting)
        self.waits = bool(waiting)

    def spill(self, folder: Path) -> None:
        """Write all of it into `folder`, the gradient that waits too, and free its memory: `take_back` comes before anything else. Blocks."""
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in self.files(optimizer=True, gradient=True).items():
            (folder / name).write_bytes(content)
        self._optimizer.state.clear()
        for tensor in (*self._masters.values(), *tensors_in(self._model, self.name).values()):
            tensor.data, tensor.grad = tensor.data.new_empty(0), None

    def take_back(self, folder: Path) -> None:
        """What `spill` wrote there. Blocks; raises OSError where it is gone."""
        values = load_tensors((folder / shapes.WEIGHTS).read_bytes())
        waiting = load_tensors((folder / GRADIENTS).read_bytes()) if self.waits else {}
        self._fill(values, waiting)
        self._restore_optimizer(folder / OPTIMIZER)

    def _fill(self, values: dict[str, torch.Tensor], waiting: dict[str, torch.Tensor]) -> None:
        """With an adapter's tensors, and its gradients."""
        masters = self._named_masters()
        for name, parameter in tensors_in(self._model, self.name).items():
            master = masters[name]
            master.data = values[name].to(master.device, master.dtype)
            if parameter is not master:
                parameter.data = master.data.to(parameter.dtype)
            if name in waiting:
                master.grad = waiting[name].to(master.device)

    def _named_masters(self) -> dict[str, torch.nn.Parameter]:
        """What the optimiser moves, as peft's files call it."""
        named = {id(parameter): name for name, parameter in self._model.named_parameters()}
        return {name: self._masters[named[id(parameter)]] for name, parameter in tensors_in(self._model, self.name).items()}

    def base_logprobs(self, sequences: Sequence[Sequence[int]], temperature: float = 1.0) -> list[list[float]]:
        """`logprobs` of the model without its adapter."""
        with active(self._model, []):
            return self.logprobs(sequences, temperature)

    def _reference_logprobs(self, batch: MicroBatch) -> torch.Tensor:
        if self._reference is not None:
            return super()._reference_logprobs(batch)
        with active(self._model, []):
            return forward.policy_logprobs(self._model, batch).logprobs_N

    def _update(self, batches: Sequence[MicroBatch], figures: Figures, *, first: bool) -> Generator[None, None, float]:
        with dropping(self._model):
            return (yield from super()._update(batches, figures, first=first))


def put_in(model: Any, name: str, section: LoraSection, modules: Sequence[str]) -> None:
    """Give `modules` of a model layers of low rank called `name`, which add nothing yet."""
    alpha: Any = section.alpha
    config = LoraConfig(r=section.rank, lora_alpha=alpha, lora_dropout=section.dropout, target_modules=list(modules), bias="none")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Already found a `peft_config`")  # several are what is wanted
        inject_adapter_in_model(config, model, name)
    for layer in layers_of(model):
        layer.eval()


def layers_of(model: Any) -> list[Any]:
    """peft's layers in a model."""
    return [module for module in model.modules() if isinstance(module, LoraLayer)]


def tensors_in(model: Any, name: str) -> dict[str, torch.nn.Parameter]:
    """The tensors of the adapter called `name` in a model, as files of it have them."""
    middle = f".{name}.weight"
    return {
        f"{shapes.PREFIX}{found.removesuffix(middle)}.weight": parameter
        for found, parameter in model.named_parameters()
        if found.endswith(middle) and found.removesuffix(middle).endswith((".lora_A", ".lora_B"))
    }


def fill(tensors: dict[str, torch.nn.Parameter], values: dict[str, torch.Tensor]) -> None:
    """Set an adapter's tensors, by name."""
    with torch.no_grad():
        for name, parameter in tensors.items():
            parameter.copy_(values[name])


@contextmanager
def active(model: Any, names: list[str]) -> Iterator[None]:
    """In the block the model computes with the adapters `names` alone."""
    before = [(layer, layer.active_adapters) for layer in layers_of(model)]
    for layer, _ in before:
        layer._active_adapter = names  # peft's own switch would take the gradients of what is under way too
    try:
        yield
    finally:
        for layer, active_before in before:
            layer._active_adapter = active_before


@contextmanager
def dropping(model: Any) -> Iterator[None]:
    """In the block adapters leave out a share of their inputs, as train.lora.dropout says."""
    layers = layers_of(model)
    for layer in layers:
        layer.lora_dropout.train()
    try:
        yield
    finally:
        for layer in layers:
            layer.lora_dropout.eval()
