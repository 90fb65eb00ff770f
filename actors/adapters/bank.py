"""Several adapters over one base model, each with an optimiser, a learning rate and steps of its own."""

import shutil
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rubato.actors.adapters.stepwise import AdamStep, Scores, SumLoss, TargetSequence, TargetsSeen, score
from rubato.actors.adapters.training import LoraTrainEngine, active
from rubato.actors.checkpoints.model_folder import pick_device
from rubato.actors.config import ModelSection, TrainSection
from rubato.actors.messages.samples import Trajectory
from rubato.actors.training.train_engine import StepResult, TrainError

MOST = 64
"""Adapters of one bank; each has its layers in the model."""


class AdapterBank:
    """Holds adapters by name. Those used longest ago lie in files of `folder` while all together take more than `budget_bytes`, which the one in
    use may take alone. Calls block, also one for another; each adapter draws its random numbers from a row of its own, so that it learns
    what it would learn alone.
    """

    def __init__(self, model: ModelSection, model_dir: Path, folder: Path, *, budget_bytes: int) -> None:
        self._model = model
        self._model_dir = model_dir
        self._folder = folder
        self._budget_bytes = budget_bytes
        self._held: OrderedDict[str, LoraTrainEngine] = OrderedDict()
        """Least recently used first."""
        self._spilled: set[str] = set()
        self._last: LoraTrainEngine | None = None
        """One that was dropped, where no other is held: the base model is its own."""
        self._count = 0
        """Of all that were ever added: each has a name of its own in the model, and a folder."""
        self._devices = [each for each in [torch.device(pick_device(model.device, torch.cuda.device_count()))] if each.type == "cuda"]
        self._random: dict[str, list[torch.Tensor]] = {}
        """Where the random numbers of each stand, on the host and on the device."""
        self._turn = threading.RLock()

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(sorted(self._held))

    @property
    def spilled(self) -> tuple[str, ...]:
        """Those that lie in files now."""
        return tuple(sorted(self._spilled))

    @property
    def held_bytes(self) -> int:
        """Of all adapters that are in memory, with the optimisers that they have from their first step on."""
        return sum(engine.held_bytes for name, engine in self._held.items() if name not in self._spilled)

    def add(self, name: str, train: TrainSection, *, steps: int, seed: int, checkpoint: Path | None = None) -> tuple[int, int]:
        """Begin an adapter as `train.lora` says, or go on with a checkpoint; returns what TrainEngine.load does. Raises TrainError or
        CheckpointError, and then there is none."""
        with self._turn:
            if name in self._held:
                raise TrainError(f"there is an adapter {name} already: drop it, or take another name")
            if len(self._held) >= MOST:
                raise TrainError(f"there are {MOST} adapters already, the most of one base model: drop one")
            beside = next(iter(self._held.values()), self._last)
            self._count += 1
            with self._own_random(name):
                engine = LoraTrainEngine(self._model, train, steps=steps, seed=seed, name=f"adapter_{self._count}", beside=beside)
                try:
                    with ExitStack() as undo:
                        undo.callback(self._forget, name, engine)
                        stands_at = engine.load(self._model_dir, checkpoint)
                        self._held[name], self._last = engine, None
                        self._make_room(name)
                        undo.pop_all()
                finally:
                    for each in self._held.values():
                        each.let_learn()
            return stands_at

    def drop(self, name: str) -> None:
        """Forget an adapter. The base model stays."""
        with self._turn:
            self._forget(name, self._require(name))
            del self._random[name]

    def version(self, name: str) -> int:
        """Steps that the adapter has had: the number of its newest version."""
        return self._require(name).version

    def train(self, name: str, groups: Sequence[Sequence[Trajectory]]) -> StepResult:
        """The next step of one adapter; the others stay as they are. Raises TrainError."""
        with self._in_use(name) as engine:
            result = engine.train(engine.version + 1, groups)
            engine.drop_gradients()
            return result

    def add_gradient(self, name: str, sequences: Sequence[TargetSequence], loss: SumLoss, *, backward: bool = True) -> list[TargetsSeen]:
        """Add the gradient of a sum to that which waits for the adapter's next `take_step`, or without `backward` only look. It is added whole,
        or not at all where this raises."""
        with self._in_use(name) as engine:
            return engine.add_gradient(sequences, loss, backward=backward)

    def take_step(self, name: str, step: AdamStep) -> float:
        """The next step of one adapter, with the gradient that waits; returns its norm. One that isn't finite moves nothing, and counts as a step."""
        with self._in_use(name) as engine:
            return engine.take_step(step)

    def files(self, name: str, *, optimizer: bool, gradient: bool = False) -> dict[str, bytes]:
        """LoraTrainEngine.files of that adapter."""
        with self._in_use(name) as engine:
            return engine.files(optimizer=optimizer, gradient=gradient)

    def set_to(self, name: str, folder: Path, *, optimizer: bool, gradient: bool = False) -> None:
        """LoraTrainEngine.set_to of that adapter."""
        with self._in_use(name) as engine:
            engine.set_to(folder, optimizer=optimizer, gradient=gradient)

    def score(self, name: str, tokens: Tensor, top: int) -> Scores:
        """Of the base model with that adapter; with the name "" without any. Raises TrainError where it was not loaded yet."""
        with self._turn:
            if name:
                with self._in_use(name) as engine:
                    return score(engine.model, tokens, top)
            beside = next(iter(self._held.values()), self._last)
            if beside is None:
                raise TrainError("the base model is not loaded: it is with the first adapter")
            with active(beside.model, []):
                return score(beside.model, tokens, top)

    def logprobs(self, name: str, sequences: Sequence[Sequence[int]], temperature: float = 1.0) -> list[list[float]]:
        """Of the base model with that adapter."""
        with self._in_use(name) as engine:
            return engine.logprobs(sequences, temperature)

    def snapshot(self, name: str, *, term: int) -> Callable[[Path], None]:
        """TrainEngine.snapshot of one adapter: its folder in peft's format, with all that `add` goes on from."""
        with self._in_use(name) as engine:
            return engine.snapshot(term=term)

    def source(self, name: str) -> "AdapterSource":
        """The adapter, for a WeightsSender. Raises TrainError for one that there is not."""
        self._require(name)
        return AdapterSource(self, name)

    def image_bytes(self, name: str) -> int:
        """Size of what `export` writes of that adapter."""
        return self._require(name).image_bytes()

    def export(self, name: str, memory: memoryview) -> Callable[[], None]:
        """TrainEngine.export of that adapter."""
        with self._in_use(name) as engine:
            return engine.export(memory)

    def _require(self, name: str) -> LoraTrainEngine:
        if name not in self._held:
            raise TrainError(f"there is no adapter {name}; there are {', '.join(self.names) or 'none'}")
        return self._held[name]

    def _forget(self, name: str, engine: LoraTrainEngine) -> None:
        engine.remove()
        if self._held.pop(name, None) is not None and not self._held:
            self._last = engine
        self._spilled.discard(name)
        shutil.rmtree(self._place(engine), ignore_errors=True)

    def _place(self, engine: LoraTrainEngine) -> Path:
        return self._folder / engine.name

    @contextmanager
    def _in_use(self, name: str) -> Iterator[LoraTrainEngine]:
        """In the block the adapter is in memory, the model computes with it alone, and random numbers are its own."""
        with self._turn:
            engine = self._require(name)
            self._held.move_to_end(name)
            self._make_room(name)
            if name in self._spilled:
                engine.take_back(self._place(engine))
                self._spilled.remove(name)
            model: Any = engine.model
            with self._own_random(name), active(model, [engine.name]):
                yield engine

    @contextmanager
    def _own_random(self, name: str) -> Iterator[None]:
        """In the block torch's random numbers go on where the adapter's stood; those of the process stay where they are."""
        with torch.random.fork_rng(self._devices):
            if name in self._random:
                host, *others = self._random[name]
                torch.set_rng_state(host)
                for device, state in zip(self._devices, others, strict=True):
                    torch.cuda.set_rng_state(state, device)
            yield
            self._random[name] = [torch.get_rng_state(), *map(torch.cuda.get_rng_state, self._devices)]

    def _make_room(self, keep: str) -> None:
        """For the adapter `keep`, which may be one of those in files. Raises TrainError where one can't be written, and keeps that."""
        needed = self._held[keep].held_bytes if keep in self._spilled else 0
        for name, engine in self._held.items():
            if self.held_bytes + needed <= self._budget_bytes:
                return
            if name != keep and name not in self._spilled:
                try:
                    engine.spill(self._place(engine))
                except OSError as error:
                    raise TrainError(f"the adapter {name} can't be put aside in {self._folder} to make room for {keep}: {error}") from error
                self._spilled.add(name)


class AdapterSource(NamedTuple):
    """WeightsSource of one adapter of a bank, in memory or in files."""

    bank: AdapterBank
    name: str

    def image_bytes(self) -> int:
        return self.bank.image_bytes(self.name)

    def export(self, memory: memoryview) -> Callable[[], None]:
        return self.bank.export(self.name, memory)
