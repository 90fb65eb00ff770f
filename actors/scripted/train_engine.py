"""A trainer without a model: its step takes a set time, and its weights have a set size and are new with every step. For test-beds."""

import json
import math
import os
import time
from collections.abc import Callable, Generator, Sequence
from functools import partial
from pathlib import Path

import msgspec

from rubato.actors.checkpoints import checkpoint as checkpoints
from rubato.actors.config import ModelSection, TrainSection
from rubato.actors.messages.samples import Trajectory
from rubato.actors.training.train_engine import StepResult, TrainError

STATE = "scripted.json"

CHUNK = 64 * 1024
"""Bytes of weights that are made at a time: a copy of all would leave a hole of its size in the heap."""


class _State(msgspec.Struct):
    step: int
    term: int = msgspec.field(name="epoch")
    """By the name under which it is stored."""


class ScriptedTrainEngine:
    """A `TrainEngine`. Its checkpoint is the step and the term."""

    num_ranks = 1

    def __init__(self, model: ModelSection, train: TrainSection, *, steps: int, seed: int) -> None:
        self._section = train.scripted
        self._state = _State(0, 0)
        self._awake = True
        self._content = os.urandom(4 * math.ceil(self._section.weights_mib * 2**18))
        size = len(self._content)
        header = json.dumps({"scripted": {"dtype": "F32", "shape": [size // 4], "data_offsets": [0, size]}}).encode()
        self._head = len(header).to_bytes(8, "little") + header

    def load(self, model_dir: Path, checkpoint: Path | None) -> tuple[int, int]:
        if checkpoint is not None:
            try:
                self._state = msgspec.json.decode((checkpoint / STATE).read_bytes(), type=_State)
            except (OSError, msgspec.MsgspecError) as error:
                raise TrainError(f"{checkpoint / STATE} can't be read: {error}") from error
        return self._state.step, self._state.term

    def train(self, step: int, groups: Sequence[Sequence[Trajectory]]) -> StepResult:
        time.sleep(self._section.step_s)  # noqa: TID251 - stands for the computation, which the actor offloads
        self._state.step = step
        rewards = [t.reward for group in groups for t in group]
        return StepResult({"reward/mean": sum(rewards) / max(1, len(rewards))}, len(rewards))

    def parts(self, step: int, groups: Sequence[Sequence[Trajectory]]) -> Generator[None, None, StepResult]:
        yield
        return self.train(step, groups)

    def logprobs(self, sequences: Sequence[Sequence[int]], temperature: float = 1.0) -> list[list[float]]:
        raise TrainError("the scripted trainer has no model to compare: set check.enabled=false")

    def image_bytes(self) -> int:
        return len(self._head) + len(self._content)

    def export(self, memory: memoryview) -> Callable[[], None]:
        """Every byte is another one than a step before, so that no delta is smaller than the whole."""
        flipped = bytes(byte ^ self._state.step % 256 for byte in range(256))
        memory[: len(self._head)] = self._head
        for at in range(0, len(self._content), CHUNK):
            chunk = self._content[at : at + CHUNK].translate(flipped)
            memory[len(self._head) + at : len(self._head) + at + len(chunk)] = chunk
        return _nothing

    def sleep(self) -> None:
        if self._awake:
            time.sleep(self._section.switch_s)  # noqa: TID251 - stands for the copies, which the actor offloads
        self._awake = False

    def wake(self) -> None:
        if not self._awake:
            time.sleep(self._section.switch_s)  # noqa: TID251 - as above
        self._awake = True

    def snapshot(self, *, term: int, receipts: Sequence[bytes] = ()) -> Callable[[Path], None]:
        self._state.term = term
        files = {STATE: msgspec.json.encode(self._state)}
        return partial(checkpoints.write, files=files, step=self._state.step, term=term, receipts=receipts)


def _nothing() -> None:
    pass
