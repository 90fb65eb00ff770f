"""What groups are given: which task, and which row of its data set. A pure function of what was given before."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest

import msgspec

from actors.datasets import epochs_of, split_of
from actors.tasks import TaskSection
from planning.epochs import Epochs
from planning.mixture import next_task


class TaskCursor(msgspec.Struct):
    """How far a task has come."""

    given: int = 0
    """Groups of it so far."""
    owed: float = 0.0
    """Of its share, in groups; see planning.mixture."""


@dataclass(frozen=True)
class Prompts:
    """What groups of one task are given."""

    weight: float = 1.0
    epochs: Epochs | None = None
    """None where the task has no rows of its own: each group gets another number then."""
    held_out: Sequence[int] | None = None
    """Rows of evaluations; None where each number is a prompt."""

    def exam(self, num: int) -> Sequence[int]:
        """Rows of an evaluation of at most `num` prompts, each once."""
        return range(num) if self.held_out is None else self.held_out[:num]


class Mixture:
    """The tasks of a job by name, in the order of the config; a job whose config names none has one with an empty name."""

    def __init__(self, tasks: Mapping[str, Prompts] | None = None) -> None:
        self._tasks = tasks or {"": Prompts()}
        self._weights = {name: prompts.weight for name, prompts in self._tasks.items()}

    def draw(self, cursors: dict[str, TaskCursor]) -> tuple[str, int]:
        """Task and row of the next group. `cursors` are moved on. Raises ConfigError where a sampler fails."""
        name, owed = next_task(self._weights, {name: cursor.owed for name, cursor in cursors.items()})
        number, epochs = cursors[name].given if name in cursors else 0, self._tasks[name].epochs
        row = number if epochs is None else epochs.row(number)  # may raise: nothing has moved yet
        for each, value in owed.items():
            cursors.setdefault(each, TaskCursor()).owed = value
        cursors[name].given += 1
        return name, row

    def exam(self, num: int) -> Iterator[tuple[str, int]]:
        """Task and row of each prompt of an evaluation with at most `num` prompts of each task.

        Tasks take turns: whoever looks at the first rollouts alone sees each of them.
        """
        exams = [[(name, row) for row in prompts.exam(num)] for name, prompts in self._tasks.items()]
        return (prompt for turn in zip_longest(*exams) for prompt in turn if prompt is not None)


def mixture_of(tasks: Mapping[str, TaskSection], seed: int) -> Mixture:
    """What the config's `tasks` give to a run with that seed. Blocks: reads data files; raises ConfigError."""
    return Mixture({name: _prompts_of(task, seed) for name, task in tasks.items()})


def _prompts_of(task: TaskSection, seed: int) -> Prompts:
    if task.data is None:
        return Prompts(task.weight)
    split = split_of(task.data)
    epochs = epochs_of(task.data, split.train, seed)
    epochs.row(0)  # a sampler that can't be used is told of at once
    return Prompts(task.weight, epochs, split.held_out)
