"""What a Tinker trainer has of its models: adapters by name, over one base model, and of each a folder that it goes on from after it was killed,
newer than any operation that is no longer kept."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import msgspec

from rubato.actors.checkpoints import checkpoint as checkpoints
from rubato.actors.messages.tinker import Begin, Computed, ForwardBackward, OptimStep, Outcome, Scored
from rubato.actors.weights.transport import WeightsSource

TORCH_MODELS = "rubato.actors.gateway.tinker.torch_models:TorchModels"
"""What makes them: of the sections model and train, the model's folder, one for what is put aside, and a budget in bytes."""

SAVED = "tinker.json"
"""Beside an adapter in peft's format, of any writer."""


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


class Saved(msgspec.Struct, frozen=True):
    """What a folder that Save wrote says of itself."""

    begin: Begin
    version: int
    optimizer: bool


class State(msgspec.Struct, frozen=True):
    """The same of a folder of the trainer's own."""

    begin: Begin
    version: int
    applied: int
    """`seq` of the newest operation that is in it."""
    follows: bool
    outcome: Outcome
    """Of that operation: the server may not have it yet."""


def read_saved(folder: Path) -> Saved:
    """What Save wrote there. Raises CheckpointError, one sentence, for a folder that is missing, cut short or altered. Blocks."""
    checkpoints.check(folder)
    try:
        return msgspec.json.decode((folder / SAVED).read_bytes(), type=Saved)
    except (OSError, msgspec.MsgspecError) as error:
        raise checkpoints.CheckpointError(f"{folder} was not saved by this server: {error}") from error


def save(folder: Path, files: Mapping[str, bytes], saved: Saved) -> None:
    """Write it whole, or leave what was there. Blocks; raises OSError and CheckpointError."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    checkpoints.write(folder, {**files, SAVED: msgspec.json.encode(saved)}, step=saved.version, term=0)


class StateFolder:
    """Of one model, as the trainer of one term writes it. All block; a trainer that was replaced is told by Replaced."""

    def __init__(self, folder: Path, term: int) -> None:
        self._folder, self._term = folder, term

    def newest(self) -> tuple[Path, State] | None:
        """None where there is none yet. What a trainer of before had begun to write is gone after it. Raises OSError for a damaged one."""
        if not self._folder.exists():
            return None
        checkpoints.take_over(self._folder, self._term)
        checkpoints.drop_unnamed(self._folder, self._term)
        path, passed_over = checkpoints.newest(self._folder)
        if passed_over:
            raise OSError(passed_over[0])
        return None if path is None else (path, msgspec.json.decode((path / SAVED).read_bytes(), type=State))

    def write(self, files: Mapping[str, bytes], state: State) -> None:
        """The newest from now on, in place of the one before. Raises OSError and CheckpointError."""
        waiting = self._folder / f"waiting_{state.applied}.{self._term}"
        checkpoints.write(waiting, {**files, SAVED: msgspec.json.encode(state)}, step=state.applied, term=self._term)
        checkpoints.name(waiting, self._folder / f"step_{state.applied}", self._term)
        checkpoints.prune(self._folder, 1, self._term)

    def remove(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)
