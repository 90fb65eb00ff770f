"""Hardware classes and models by name: the files of configs/hardware and configs/models, which are packed with this folder."""

from pathlib import Path
from typing import TypeVar

from actors.config import one_of
from planning.hardware import GpuSpec, Spec
from planning.language_model import ModelSpec
from runtime.config.source import read

SpecT = TypeVar("SpecT", bound=Spec)

FOLDER = Path(__file__).parent


def hardware(name: str) -> GpuSpec:
    """The class `name`, such as h20. Raises ValueError, a sentence with the nearest name, where there is none."""
    return _named(GpuSpec, "hardware", name)


def model(name: str) -> ModelSpec:
    """The shape of model `name`, such as qwen3-8b. Raises ValueError, a sentence with the nearest name, where there is none."""
    return _named(ModelSpec, "models", name)


def _named(kind: type[SpecT], folder: str, name: str) -> SpecT:
    names = sorted(path.stem for path in (FOLDER / folder).glob("*.yaml") if not path.stem.startswith("prices"))
    return kind.model_validate(read(FOLDER / folder / f"{one_of(name.lower(), names)}.yaml").tree)
