"""What groups are given: which task, and which row of its data set. A pure function of what was given before."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest

import msgspec

from rubato.actors import plugins
from rubato.actors.data.tasks import TaskSection
from rubato.planning.prompts import Epochs, next_task
from rubato.runtime.errors import ConfigError


class TaskCursor(msgspec.Struct):
    """How far a task has come."""

    given: int = 0
    """Groups of it so far."""
    owed: float = 0.0
    """Of its share, in groups; see rubato.planning.prompts."""
    rows: int = 0
    """Rows that it had to train on; 0 where it has none of its own."""
    digest: str = ""
    """Of the content of their file."""
    held_out: str = ""
    """Of the file of held-out rows, as it was last seen."""


@dataclass(frozen=True)
class Prompts:
    """What groups of one task are given."""

    weight: float = 1.0
    epochs: Epochs | None = None
    """None where the task has no rows of its own: each group gets another number then."""
    held_out: Sequence[int] | None = None
    """Rows of evaluations; None where each number is a prompt."""
    rows: int = 0
    """Rows to train on, of which `epochs` are; 0 where it has none of its own."""
    path: str = ""
    digest: str = ""
    """Of the content of `path`, where they are from."""
    held_out_path: str = ""
    held_out_digest: str = ""
    """Of the file that `held_out` are from, where that is another."""

    def exam(self, num: int) -> Sequence[int]:
        """Rows of an evaluation of at most `num` prompts, each once."""
        return range(num) if self.held_out is None else self.held_out[:num]


class Mixture:
    """The tasks of a job by name, in the order of the config; a job whose config names none has one with an empty name."""

    def __init__(self, tasks: Mapping[str, Prompts] | None = None) -> None:
        self._tasks = tasks or {"": Prompts()}
        self._weights = {name: prompts.weight for name, prompts in self._tasks.items()}

    def draw(self, cursors: dict[str, TaskCursor]) -> tuple[str, int]:
        """Task and row of the next group. `cursors` are moved on.

        Raises ConfigError where a sampler fails, and where a task has other rows than before: then no epoch is what it was.
        """
        name, owed = next_task(self._weights, {name: cursor.owed for name, cursor in cursors.items()})
        cursor, prompts = cursors.get(name) or TaskCursor(), self._tasks[name]
        _check_rows(name, cursor, prompts)
        row = cursor.given if prompts.epochs is None else prompts.epochs.row(cursor.given)
        for each, value in owed.items():  # nothing has moved before
            cursors.setdefault(each, TaskCursor()).owed = value
        cursors[name].given += 1
        cursors[name].rows, cursors[name].digest = prompts.rows, prompts.digest
        return name, row

    def check(self, cursors: dict[str, TaskCursor]) -> list[str]:
        """Sentences on held-out rows that are others than before; `cursors` know them from here on.

        Raises ConfigError where the rows to train on are others.
        """
        told: list[str] = []
        for name, prompts in self._tasks.items():
            cursor = cursors.setdefault(name, TaskCursor())
            _check_rows(name, cursor, prompts)
            if cursor.held_out not in ("", prompts.held_out_digest):
                told.append(
                    f"the held-out rows of tasks.{name} ({prompts.held_out_path}) are others than before: its evaluations don't compare "
                    "with those so far"
                )
            cursor.held_out = prompts.held_out_digest
        return told

    def exam(self, num: int) -> Iterator[tuple[str, int]]:
        """Task and row of each prompt of an evaluation with at most `num` prompts of each task.

        Tasks take turns, so that the first rollouts alone show each of them.
        """
        exams = [[(name, row) for row in prompts.exam(num)] for name, prompts in self._tasks.items()]
        return (prompt for turn in zip_longest(*exams) for prompt in turn if prompt is not None)


def _check_rows(name: str, cursor: TaskCursor, prompts: Prompts) -> None:
    """Raises ConfigError where the rows to train on are not those of before."""
    risk = "some would come twice, and some be held out that were trained on"
    if cursor.rows not in (0, prompts.rows):
        raise ConfigError(
            f"tasks.{name} has {prompts.rows} rows to train on, where this run had {cursor.rows}: {risk}. "
            "Put its data and eval_rows back, or start another run."
        )
    if cursor.digest not in ("", prompts.digest):
        raise ConfigError(
            f"tasks.{name}: the content of {prompts.path} is not what this run was trained on so far: {risk}. "
            "Put the data back, or start another run."
        )


def mixture_of(tasks: Mapping[str, TaskSection], seed: int) -> Mixture:
    """What the config's `tasks` give to a run with that seed. Blocks: reads data files; raises ConfigError."""
    return Mixture({name: _prompts_of(task, seed) for name, task in tasks.items()})


def _prompts_of(task: TaskSection, seed: int) -> Prompts:
    if task.data is None:
        return Prompts(task.weight)
    rows = plugins.load(plugins.DATA_ROWS)(task.data, seed)
    data = task.data
    return Prompts(task.weight, rows.epochs, rows.held_out, rows.num, data.source, rows.digest, data.eval_source, rows.held_out_digest)
