"""What a Tinker trainer has of its models: adapters by name, over one base model."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from rubato.actors.messages.tinker import Begin, Computed, ForwardBackward, OptimStep, Scored
from rubato.actors.weights.transport import WeightsSource

MODELS: Mapping[str, str] = {
    "torch": "rubato.actors.gateway.tinker.torch_models:TorchModels",
    "scripted": "rubato.actors.scripted.tuned:ScriptedModels",
}
"""`train.kind` → what makes them: of the sections model and train, the model's folder, one for what is put aside, and a budget in bytes."""


class TunedModels(Protocol):
    """Calls block, and come one at a time. What a client got wrong raises TrainError, and then nothing changed; so it is where memory is short,
    which raises MemoryError, and where a file can't be written or read, which raises OSError. Anything else leaves all in doubt.
    """

    def __init__(self, model: Any, train: Any, model_dir: Path, folder: Path, budget_bytes: int) -> None: ...
    def load(self) -> None:
        """The base model. Raises TrainError."""
        ...

    @property
    def most(self) -> int:
        """Models at once."""
        ...

    def begin(self, model: str, begin: Begin) -> None:
        """A new one, or what `files` gave in `begin.start`."""
        ...

    def drop(self, model: str) -> None: ...
    def forward_backward(self, model: str, operation: ForwardBackward) -> Computed: ...
    def optim_step(self, model: str, operation: OptimStep) -> Mapping[str, float]:
        """Its metrics."""
        ...

    def files(self, model: str, *, optimizer: bool, gradient: bool = False) -> Mapping[str, bytes]:
        """Of a folder that `set_to` goes on from: the model as it is now, and the gradient that waits too."""
        ...

    def set_to(self, model: str, folder: Path, *, optimizer: bool, gradient: bool = False) -> None:
        """What was not asked for begins anew."""
        ...

    def source(self, model: str) -> WeightsSource:
        """As engines get it."""
        ...

    def source_of(self, folder: Path) -> WeightsSource:
        """The same of what lies in a folder."""
        ...

    def score(self, tokens: bytes, *, model: str = "", folder: Path | None = None, top: int = 0) -> Scored:
        """Under one of them, under what lies in a folder, or under the base model."""
        ...
