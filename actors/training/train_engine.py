"""The TrainEngine seam: what the Trainer actor asks of the ranks that hold the model. Calls block; the actor offloads them."""

from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from rubato.actors.messages.samples import Trajectory


class StepResult(NamedTuple):
    """Metrics of one optimiser step by their names in metrics.jsonl (`policy/*`, `optim/*`, `reward/*`, …)."""

    metrics: Mapping[str, float]
    num_tokens: int


class TrainEngine(Protocol):
    """Model, optimiser and RNG, on `num_ranks` ranks; the actor calls the first of them, and its calls are for all."""

    @property
    def num_ranks(self) -> int:
        """Processes that hold a share of the model, this one included."""
        ...

    def load(self, model_dir: Path, checkpoint: Path | None) -> tuple[int, int]:
        """Load the base model, or resume a checkpoint; returns the step and term the weights stand at ((0, 0) for a base model).

        Raises TrainError or CheckpointError with one sentence when files are missing, truncated or do not fit.
        """
        ...

    def train(self, step: int, groups: Sequence[Sequence[Trajectory]]) -> StepResult:
        """One step over whole groups. Those that teach nothing count in the statistics.

        Raises TrainError where a loss of the user's own is none.
        """
        ...

    def parts(self, step: int, groups: Sequence[Sequence[Trajectory]]) -> Generator[None, None, StepResult]:
        """`train`, which stops at each `yield`, so at least between two micro-batches: none is computed before the next is asked for.

        Only `sleep` and `wake` may come in between. The step is the same with them.
        """
        ...

    def logprobs(self, sequences: Sequence[Sequence[int]], temperature: float = 1.0) -> list[list[float]]:
        """Log-probability of each token given those before it (first token: 0.0), by the forward pass of `train`.

        At `temperature`, where 0 (greedy) counts as 1.
        """
        ...

    def image_bytes(self) -> int:
        """Size of what `export` writes."""
        ...

    def export(self, memory: memoryview) -> Callable[[], None]:
        """Write the weights into `memory`, of `image_bytes`: one safetensors image with HF names. `train` may follow at once.

        The image is whole when what this returns was called, from any thread; that comes before the next `export`. Either of them raises
        TrainError, one sentence, where a tensor holds NaN or infinity.
        """
        ...

    def snapshot(self, *, term: int, receipts: Sequence[bytes] = ()) -> Callable[[Path], None]:
        """Take down model, optimiser, RNG, step and `receipts`. What this returns writes them into a folder, every file flushed to
        disk, from any thread while training goes on; it raises CheckpointError naming the cause (disk full, …).
        """
        ...

    def sleep(self) -> None:
        """Move model, optimiser and whatever else lies on a device to host memory; all but `train`, `parts` and `logprobs` goes on from there.

        Asleep already, or without a device: nothing happens.
        """
        ...

    def wake(self) -> None:
        """Bring it back to the device. Awake already: nothing happens."""
        ...


def image_of(engine: TrainEngine) -> memoryview:
    """The weights in memory of their own, for a process that trains and samples. Blocks."""
    memory = memoryview(bytearray(engine.image_bytes()))
    engine.export(memory)()
    return memory


class TrainError(Exception):
    """The training boundary: what failed, on which file or step, and what to do."""


TRAIN_ENGINES: Mapping[str, str] = {
    "torch": "rubato.actors.training.torch_train:TorchTrainEngine",
    "scripted": "rubato.actors.scripted.train_engine:ScriptedTrainEngine",
}
"""`train.kind` → class, built as `Class(ModelSection, TrainSection, steps=…, seed=…)`; imported only when it is chosen."""
