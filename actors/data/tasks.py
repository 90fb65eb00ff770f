"""The tasks of a job: a weighted mixture of named ones, each an environment class, a data set with a grader, or one of reasoning-gym's."""

import difflib
import os
import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Self

from pydantic import AfterValidator, Field, model_validator

from actors.config import RewardSection, RewardTarget, Stops, one_of
from runtime.config import Section

GRADERS: Mapping[str, str] = {name: f"actors.data.graders:{name}" for name in ("exact", "number", "places", "math")}
"""Those that come with Rubato, by the name that `tasks.NAME.data.grader` has."""

OWN_COLUMNS = (
    "task", "row", "purpose", "trajectory", "version", "seed", "turn", "turns", "invalid_turns", "truncated", "env_reward", "finish_reasons",
    "texts", "completion", "completions",
)  # fmt: skip
"""What Rubato itself tells graders, reward functions and judges by name: a data set has no column of such a name, or it would be unclear
which of the two they are given."""

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")

EXTRA = "pip install -e '.[tasks]'"


def _path(given: str) -> str:
    """A run is resumed from anywhere: relative paths start at the working folder of its first launch."""
    return os.path.abspath(os.path.expanduser(given)) if given else ""


def _grader(given: str) -> str:
    return given if ":" in given else one_of(given, tuple(GRADERS), ", and no path/to/file.py:function")


class DataSection(Section):
    """A data set of prompts, and the grader that says what a completion is worth."""

    renamed: ClassVar[Mapping[str, str]] = {"verifier": "grader"}

    path: Annotated[str, AfterValidator(_path)]
    """JSONL or Parquet file, or a folder that `datasets` saved; relative paths start at the working folder, ~ is your home."""
    eval_path: Annotated[str, AfterValidator(_path)] = ""
    """The same for held-out rows."""
    eval_rows: int = Field(default=0, ge=0)
    """Rows of `path` that are held out, drawn at random, and always the same; for where there is no `eval_path`."""
    prompt: str = "prompt"
    """Column with what the model is shown: a text, or chat messages."""
    answer: str = "answer"
    """Column that the grader compares with."""
    grader: Annotated[str, AfterValidator(_grader)] = "exact"
    """exact, number, places, math, or your own as path/to/file.py:function; see docs/tasks.md."""
    sampler: str = ""
    """Import path of the function that orders an epoch's rows; empty shuffles them."""

    @model_validator(mode="after")
    def _holds_out(self) -> Self:
        if self.eval_path and self.eval_rows:
            raise ValueError(f"eval_rows={self.eval_rows} has no effect beside eval_path. Give one of them")
        if self.eval_path and os.path.realpath(self.eval_path) == os.path.realpath(self.path):
            raise ValueError("eval_path is path itself, so what it holds out is trained on. Set eval_rows instead")
        return self


class TaskSection(Section):
    """One task: `class`, `data` or `reasoning_gym`. What it does not say itself it takes from `env`, `rollout` and `reward`."""

    weight: float = Field(default=1.0, ge=0)
    """Its share of all groups is this over the sum of all weights; 0 is only evaluated."""
    target: str = Field(default="", alias="class")
    """Import path of an environment: package.module:Class or path/to/file.py:Class."""
    data: DataSection | None = None
    """A data set with a grader."""
    reasoning_gym: str = ""
    """Name of a task that reasoning-gym generates, such as chain_sum."""
    kwargs: dict[str, Any] = {}
    """Arguments of the environment's constructor, or of reasoning-gym's task."""
    eval_kwargs: dict[str, Any] = {}
    """Arguments that replace those above for held-out prompts; empty takes what the class declares as `held_out`."""
    max_turns: int | None = Field(default=None, ge=1)
    """As `rollout.max_turns`."""
    max_new_tokens: int | None = Field(default=None, ge=1)
    """As `rollout.max_new_tokens`."""
    temperature: float | None = Field(default=None, ge=0)
    """As `rollout.temperature`."""
    stop: Stops | None = None
    """As `rollout.stop`."""
    system_prompt: str | None = None
    """As `rollout.system_prompt`."""
    rewards: tuple[RewardTarget, ...] | None = None
    """As `reward.functions`; left out, those and `reward.url`."""


def _mixture(tasks: dict[str, TaskSection]) -> dict[str, TaskSection]:
    sources = {n: [k for k in ("class", "data", "reasoning_gym") if _has(t, k)] for n, t in tasks.items()}
    for name, found in sources.items():
        if not NAME.fullmatch(name):
            raise ValueError(f"{name!r} can't be a task's name: use letters, digits, and _ . - inside")
        if not found:
            near = difflib.get_close_matches(name, [other for other in sources if sources[other]], n=1)
            guess = f"Did you mean {near[0]}?" if near else "Give it one of them"
            raise ValueError(f"{name} names no class, no data and no reasoning_gym. {guess}")
        if len(found) > 1:
            raise ValueError(f"{name} names {' and '.join(found)}: a task has one of them. Make it two tasks")
        if tasks[name].data and (idle := [key for key in ("kwargs", "eval_kwargs") if getattr(tasks[name], key)]):
            raise ValueError(f"{name}.{idle[0]} has no effect beside data. Leave it out")
    if tasks and not sum(task.weight for task in tasks.values()):
        raise ValueError(
            f"the weights of {', '.join(tasks)} sum to 0, so there is nothing to train on. Give one of them a weight above 0"
        )
    return tasks


def _has(task: TaskSection, kind: str) -> bool:
    return bool(task.target if kind == "class" else getattr(task, kind))


Tasks = Annotated[dict[str, TaskSection], AfterValidator(_mixture)]
"""The section `tasks`, as each actor declares it that reads it; without it a job has one task without a name."""


def rewards_of(tasks: Mapping[str, TaskSection], reward: RewardSection) -> dict[str, tuple[str, ...]]:
    """The reward functions of each task."""
    own = {name: reward.targets if task.rewards is None else task.rewards for name, task in tasks.items()}
    return own or {"": reward.targets}
