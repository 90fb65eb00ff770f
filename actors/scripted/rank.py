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


class ScriptedRank(ScriptedTrainEngine):
    """A RankEngine (actors/ranks/rank.py). Its ranks wait for nothing from each other."""

    device = "none"

    def __init__(self, model: ModelSection, train: TrainSection, *, steps: int, seed: int, rank: int, meet: Meeting) -> None:
        super().__init__(model, train, steps=steps, seed=seed)
        self._rank, self.num_ranks = rank, train.mesh.size

    def exchanged(self) -> tuple[int, int]:
        return 0, 0

    def is_lost(self, error: Exception) -> bool:
        return False

    def export(self, memory: memoryview) -> Callable[[], None]:
        """Its share of the bytes alone."""
        for at, num in self.pieces():
            self.pack(memory[at : at + num])
        return _nothing

    def pieces(self) -> list[tuple[int, int]]:
        """Its share."""
        each = -(-self.image_bytes() // self.num_ranks)
        begin = min(self._rank * each, self.image_bytes())
        return [(begin, min(each, self.image_bytes() - begin))]

    def pack(self, memory: memoryview) -> None:
        whole = memoryview(bytearray(self.image_bytes()))
        super().export(whole)
        begin = self.pieces()[0][0]
        memory[:] = whole[begin : begin + len(memory)]

    def saved(self, term: int) -> ScriptedRows:
        self._state.term = term
        return ScriptedRows({} if self._rank else {STATE: msgspec.json.encode(self._state)})


def _nothing() -> None:
    pass
