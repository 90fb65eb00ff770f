"""Decides whether a weights image fits a model folder, before an engine that can't undo it touches its weights."""

from pathlib import Path
from typing import Self

from actors.engines.engine import EngineError
from actors.engines.model_weights import tensors_of
from actors.engines.weights import folder_images, read_header


class ExpectedTensors:
    """Names and shapes of a model's tensors."""

    def __init__(self, shapes: dict[str, tuple[int, ...]]) -> None:
        self.shapes = shapes
        self.names = sorted(shapes)

    @classmethod
    def of_folder(cls, folder: Path) -> Self:
        """Read the headers of a model folder. Raises EngineError when it holds no weights or damaged ones."""
        images = folder_images(folder)
        return cls(
            {name: entry.shape for source, image in images for name, entry in read_header(image, source).items()}
        )

    def check(self, image: memoryview, source: str) -> None:
        """Raises EngineError, naming `source`, when a tensor is missing, has another shape or isn't finite. Others are ignored."""
        import torch

        tensors = tensors_of(image, source)
        for name, shape in self.shapes.items():
            tensor = tensors.get(name)
            if tensor is None:
                raise EngineError(f"{source} lacks {name}: it belongs to another model, or is incomplete")
            if tuple(tensor.shape) != shape:
                raise EngineError(
                    f"{source}: {name} has shape {list(tensor.shape)}, but this model needs {list(shape)}"
                )
            if not torch.isfinite(tensor.sum(dtype=torch.float32)):
                raise EngineError(f"{source}: {name} is not finite: training diverged, or the image is damaged")
