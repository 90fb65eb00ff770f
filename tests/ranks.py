"""Engines of one rank and of several for tests, and batches for them."""

import os
import random
import struct
from functools import partial
from pathlib import Path
from typing import Any

import torch

from rubato.actors.checkpoints import checkpoint as checkpoints
from rubato.actors.config import ModelSection, TrainSection
from rubato.actors.messages.generation import VersionSpan
from rubato.actors.messages.samples import Segment, Ticket, Trajectory
from rubato.actors.ranks.meeting import Meeting
from rubato.actors.ranks.torch_rank import TorchRank
from rubato.actors.training.torch_train import TorchTrainEngine
from tools.bench.forked import forked

VOCAB = 32


class Watched:
    """Mixed into an engine: moves by SGD where it is asked to, and remembers the gradients of its first update, whole."""

    sgd = True
    grads: dict[str, torch.Tensor]

    def _new_optimizer(self) -> Any:
        if self.sgd:
            return torch.optim.SGD(self._masters.values(), lr=self._train_section.lr)  # type: ignore[attr-defined]
        return super()._new_optimizer()  # type: ignore[misc]

    def _clip(self) -> torch.Tensor:
        if not hasattr(self, "grads"):
            self.grads = {name: whole(master.grad).clone() for name, master in self._masters.items()}  # type: ignore[attr-defined]
        return super()._clip()  # type: ignore[misc]

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: whole(master.detach()).clone() for name, master in self._masters.items()}  # type: ignore[attr-defined]


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Of a tensor in shares: all ranks must ask."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor  # type: ignore[attr-defined]


class OneRank(Watched, TorchTrainEngine):
    """The engine of one process."""


class ManyRank(Watched, TorchRank):
    """One of several."""


def one(model: Path, *, wide: str = "float32", sgd: bool = True, dtype: str = "float32", **options: Any) -> OneRank:
    found = OneRank(ModelSection(path=str(model), dtype=dtype), TrainSection(**options), steps=10, seed=1)
    found.wide, found.sgd = wide, sgd
    return found


def many(
    model: Path,
    rank: int,
    store: Path,
    mesh: tuple[int, int],
    *,
    wide: str = "float32",
    sgd: bool = True,
    dtype: str = "float32",
    offload: bool = False,
    **options: Any,
) -> ManyRank:
    train = TrainSection(mesh={"replicate": mesh[0], "shard": mesh[1], "offload": offload}, **options)
    found = ManyRank(ModelSection(path=str(model), dtype=dtype), train, steps=10, seed=1, rank=rank, meet=Meeting(str(store)))
    found.wide, found.sgd = wide, sgd
    return found


def went_on(engine: Any, model: Path, checkpoint: Path | None, step: int) -> float:
    """The loss of `step`, the first after what was loaded."""
    engine.load(model, checkpoint)
    return engine.train(step, batch(step, version=step - 1)).metrics["policy/loss"]


def saved_by(num: int, model: Path, folder: Path, step: int, checkpoint: Path | None, **options: Any) -> tuple[Path, float]:
    """The checkpoint of `step` that `num` ranks write, each its own rows, and their loss. `checkpoint`: of the step before."""
    loss, *_ = forked(num, folder, partial(_rank_saves, model, folder, checkpoint, num, step, options))
    found = folder / f"step_{step}"
    checkpoints.write(found, {}, step=step, term=1, fill=partial(_moved, folder / f"rows.{step}"))
    return found, loss


def _rank_saves(model: Path, folder: Path, checkpoint: Path | None, num: int, step: int, options: dict[str, Any], rank: int) -> float:
    engine = many(model, rank, folder / f"store.{num}", (1, num), **options, sgd=False)
    loss = went_on(engine, model, checkpoint, step)
    saved = engine.saved(1)
    (folder / f"rows.{step}").mkdir(exist_ok=True)
    saved.write(folder / f"rows.{step}")
    for name, content in saved.files.items():
        (folder / f"rows.{step}" / name).write_bytes(content)
    return loss


def _moved(rows: Path, folder: Path) -> dict[str, str]:
    for path in rows.iterdir():
        os.replace(path, folder / path.name)
    return {path.name: checkpoints.digest_of_file(path) for path in folder.iterdir()}


def batch(seed: int, *, num_groups: int = 5, version: int = 0) -> list[list[Trajectory]]:
    """Groups of four rollouts of other lengths, one of the groups without spread."""
    chance = random.Random(seed)
    return [[_rollout(chance, group, index, version) for index in range(4)] for group in range(num_groups)]


def _rollout(chance: random.Random, group: int, index: int, version: int) -> Trajectory:
    num = chance.randrange(4, 14)
    tokens = [chance.randrange(VOCAB) for _ in range(num)]
    mask = [0, 0, *(int(chance.random() < 0.8) for _ in range(num - 3)), 1]
    logprobs = [-chance.uniform(2.0, 5.0) * sampled for sampled in mask]
    spans = tuple(VersionSpan(version, i, i + 1) for i, sampled in enumerate(mask) if sampled)
    segment = Segment(struct.pack(f"<{num}i", *tokens), bytes(mask), struct.pack(f"<{num}f", *logprobs), spans)
    reward = 1.0 if group == 1 else float(chance.randrange(3) + index)
    return Trajectory(Ticket("t", f"g{group}", 1, 0, 0, version), (segment,), reward, 1, False, 0.1)
