"""Stands where a job has its trainer, and trains nothing: it evaluates one model after the other, each under its own version."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from rubato.actors.adapters.shapes import WEIGHTS as ADAPTER_WEIGHTS
from rubato.actors.checkpoints import checkpoint as checkpoints
from rubato.actors.checkpoints.model_check import check_model_folder
from rubato.actors.checkpoints.model_folder import ADAPTER_CONFIG, WEIGHTS
from rubato.actors.messages.weights import WeightsTaken
from rubato.actors.training.evaluation import HeldOut
from rubato.actors.training.publishing import Publisher
from rubato.actors.training.trainer import Trainer
from rubato.actors.weights.blobs import BlobSender
from rubato.runtime.actor import Actor, handler
from rubato.runtime.config import Section
from rubato.runtime.kernel import Kernel

EPOCH = 1
"""Of what it publishes: above that of the model with which engines begin."""


class EvaluateSection(Section):
    """What `rubato eval` evaluates."""

    models: tuple[str, ...] = ()
    """Model folders, checkpoints in the order of their steps; engines begin with the first, or with the base model of adapters."""


class Evaluator(Actor):
    """Publishes each checkpoint as the version that its step is; a model that is none is version 0, which engines begin with."""

    role = "trainer"
    drain_order = 20
    least = most = 1
    needs = ("sample_buffer",)

    class Config(Trainer.Config):
        evaluate: EvaluateSection = EvaluateSection()

    config: Config

    @classmethod
    def preflight(cls, config: Any, folder: Path) -> None:
        """The model that engines begin with."""
        if config.train.has_model:
            check_model_folder(folder / config.model.path)

    def __init__(self, config: Any, kernel: Kernel) -> None:
        super().__init__(config, kernel)
        self._out = Publisher(self, BlobSender(self))
        self._held_out = HeldOut(self, config.eval)

    async def on_start(self) -> None:
        """Begin with the first."""
        self._held_out.take_over(-1)
        self.spawn(self._evaluate_all(), name="trainer.evaluate")

    async def on_peers(self, joined: tuple[str, ...], left: tuple[str, ...]) -> None:
        self._held_out.left(left)

    @handler
    async def weights_taken(self, message: WeightsTaken) -> None:
        """Who holds a version is asked; one that computes with another spoils every figure."""
        if said := self._out.disagreement(message):
            self.finish(said, failed=True)

    async def _evaluate_all(self) -> None:
        section = self.config.eval
        num = section.final_num_tasks or section.num_tasks
        for model in map(Path, self.config.evaluate.models):
            step = await self.offload(step_of, model)
            if step:
                file = ADAPTER_WEIGHTS if (model / ADAPTER_CONFIG).exists() else WEIGHTS
                await self._out.publish(step, EPOCH, StoredWeights(model / file))
                await self._out.announced()
            await self._held_out.evaluate(step, EPOCH if step else 0, num, share=1)
            if not self._held_out.take():
                self.finish(f"{model} has no result after eval.timeout_s={section.timeout_s:g} s", failed=True)
                return
        self.finish(f"evaluated {len(self.config.evaluate.models)} models")


class StoredWeights:
    """The weights of a model folder, as Publisher takes them."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def image_bytes(self) -> int:
        return self._path.stat().st_size

    def export(self, memory: memoryview) -> Callable[[], None]:
        """Raises OSError where the file is gone. Blocks."""
        with self._path.open("rb") as file:
            file.readinto(memory)
        return lambda: None


def step_of(model: Path) -> int:
    """Of a checkpoint; 0 of any other model folder. Raises CheckpointError for a damaged one. Blocks."""
    return checkpoints.check(model).step if (model / checkpoints.MANIFEST).exists() else 0
