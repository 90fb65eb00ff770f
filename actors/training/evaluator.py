"""Stands where a job has its trainer, and trains nothing: it evaluates one model after the other, each under its own version."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from rubato.actors.adapters import shapes
from rubato.actors.checkpoints import checkpoint as checkpoints
from rubato.actors.checkpoints.model_check import check_model_folder
from rubato.actors.checkpoints.model_folder import ADAPTER_CONFIG, map_file, read_header, weight_files
from rubato.actors.messages.weights import WeightsTaken
from rubato.actors.training.evaluation import HeldOut
from rubato.actors.training.publishing import Publisher
from rubato.actors.training.trainer import Trainer
from rubato.actors.weights.transport import BlobSender
from rubato.runtime.actor import Actor, handler
from rubato.runtime.config import Section
from rubato.runtime.errors import ConfigError
from rubato.runtime.kernel import Kernel

TERM = 1
"""Of what it publishes: above that of the model with which engines begin."""


class EvaluateSection(Section):
    """What `rubato eval` evaluates."""

    models: tuple[str, ...] = ()
    """Model folders, checkpoints in the order of their steps; engines begin with the first, or with the base model of adapters."""


class Evaluator(Actor):
    """Publishes each checkpoint as the version that its step is; a model that is none is version 0, which engines begin with. An adapter that
    is none is version 1."""

    role = "trainer"
    drain_order = 20
    least = most = 1
    needs = ("sample_buffer",)

    class Config(Trainer.Config):
        evaluate: EvaluateSection = EvaluateSection()

    config: Config

    @classmethod
    def preflight(cls, config: Any, folder: Path) -> None:
        """The model that engines begin with, and the adapters over it."""
        if not config.train.has_model:
            return
        check_model_folder(model := folder / config.model.path)
        try:
            if (lora := config.train.lora) is not None:
                for adapter in config.evaluate.models:
                    shapes.check_start(Path(adapter), model, lora)
        except shapes.AdapterError as error:
            raise ConfigError(f"{error}.") from None

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
                base = self.run.folder / self.config.model.path
                await self._out.publish(step, TERM, await self.offload(partial(StoredWeights, model, base)))
                await self._out.announced()
            await self._held_out.evaluate(step, TERM if step else 0, num, share=1)
            if not self._held_out.take():
                self.finish(f"{model} has no result after eval.timeout_s={section.timeout_s:g} s", failed=True)
                return
        self.finish(f"evaluated {len(self.config.evaluate.models)} models")


class StoredWeights:
    """The weights of a model folder, in whichever files they are, as Publisher takes them: one safetensors image."""

    def __init__(self, folder: Path, base: Path) -> None:
        """The image of an adapter over `base` names that model, also where another program wrote it. Blocks.

        Reads headers alone. Raises ValueError, one sentence.
        """
        if (folder / ADAPTER_CONFIG).exists():
            config, image = shapes.read_adapter(folder)
            images, told = {str(folder): image}, dict[str, str]()
            if shapes.RANK not in shapes.told_of(image):
                told = shapes.telling(shapes.Scaled(config.r, config.lora_alpha), shapes.base_of(base))
        else:
            images, told = {str(file): map_file(file) for file in weight_files(folder)}, {}
        self._parts = [*images.values()] if len(images) == 1 and not told else _joined(images, told)

    def image_bytes(self) -> int:
        return sum(map(len, self._parts))

    def export(self, memory: memoryview) -> Callable[[], None]:
        """Blocks."""
        at = 0
        for part in self._parts:
            memory[at : at + len(part)] = part
            at += len(part)
        return lambda: None


def _joined(images: Mapping[str, memoryview], told: Mapping[str, str]) -> list[memoryview]:
    """The parts of one image with the tensors of several, which go by their names. `told`: what it says of itself."""
    described, tensors, at = dict[str, Any]({"__metadata__": told} if told else {}), list[memoryview](), 0
    for file, image in images.items():
        for name, (dtype, shape, begin, end) in read_header(image, file).items():
            described[name] = {"dtype": dtype, "shape": [*shape], "data_offsets": [at, at + end - begin]}
            tensors.append(image[begin:end])
            at += end - begin
    header = msgspec.json.encode(described)
    header += b" " * (-len(header) % 8)
    return [memoryview(len(header).to_bytes(8, "little") + header), *tensors]


def step_of(model: Path) -> int:
    """Of a checkpoint; 1 of the folder of an adapter, and 0 of any other model folder. Raises CheckpointError for a damaged one. Blocks."""
    if (model / checkpoints.MANIFEST).exists():
        return checkpoints.check(model).step
    return int((model / ADAPTER_CONFIG).exists())
