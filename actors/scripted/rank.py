"""One rank of a trainer without a model: it holds its share of weights that mean nothing, and its part of a step takes a set time."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from rubato.actors.config import ModelSection, TrainSection
from rubato.actors.ranks.meeting import Meeting
from rubato.actors.scripted.train_engine import STATE, ScriptedTrainEngine


class ScriptedRows(NamedTuple):
    """A rank's part of a checkpoint, all of which is the first one's."""

    files: Mapping[str, bytes]
    rows: Mapping[str, Any] = {}

    def write(self, folder: Path) -> None:
        """There are no rows."""


class ScriptedWeights(NamedTuple):
    """A rank's share of the bytes, from `at` on."""

    at: int
    values: memoryview
    size_bytes: int
    """Of the whole."""

    def pieces(self) -> list[tuple[int, memoryview]]:
        return [(self.at, self.values)]


class ScriptedRank(ScriptedTrainEngine):
    """A RankEngine (actors/ranks/rank.py). Its ranks wait for nothing from each other."""

    device = "none"

    def __init__(self, model: ModelSection, train: TrainSection, *, steps: int, seed: int, rank: int, meet: Meeting) -> None:
        super().__init__(model, train, steps=steps, seed=seed)
        self._rank, self.num_ranks = rank, train.mesh.size

    def is_lost(self, error: Exception) -> bool:
        return False

    def export(self, memory: memoryview) -> Callable[[], None]:
        """Its share of the bytes alone."""
        for at, values in self.weights().pieces():
            memory[at : at + len(values)] = values
        return _nothing

    def weights(self) -> "ScriptedWeights":
        whole = memoryview(bytearray(self.image_bytes()))
        super().export(whole)
        each = -(-len(whole) // self.num_ranks)
        return ScriptedWeights(self._rank * each, whole[self._rank * each : (self._rank + 1) * each], len(whole))

    def saved(self, epoch: int) -> ScriptedRows:
        self._state.epoch = epoch
        return ScriptedRows({} if self._rank else {STATE: msgspec.json.encode(self._state)})


def _nothing() -> None:
    pass
