"""The tasks of a job: a weighted mixture of named ones, each an environment class, a data set with a grader, or one of reasoning-gym's,
textarena's or verifiers'."""

import difflib
import os
import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, NamedTuple, Self

from pydantic import AfterValidator, Field, model_validator

from rubato.actors.config import HubName, RewardSection, RewardTarget, Stops, name_of, one_of
from rubato.runtime.config import Section
from rubato.runtime.importer import example

KINDS = ("class", "data", "reasoning_gym", "textarena", "verifiers")
"""What a task names one of."""

GRADERS: Mapping[str, str] = {name: f"rubato.actors.data.graders:{name}" for name in ("exact", "number", "places", "math")}
"""Those that come with Rubato, by the name that `tasks.NAME.data.grader` has."""

OWN_COLUMNS = (
    "task", "row", "purpose", "trajectory", "version", "seed", "turn", "turns", "invalid_turns", "truncated", "env_reward", "finish_reasons",
    "texts", "completion", "completions",
)  # fmt: skip
"""What Rubato itself tells graders, reward functions and judges by name: a data set has no column of such a name, or it would be unclear
which of the two they are given."""

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")

EXTRA = "pip install -e '.[tasks]'"

SUFFIXES = (".jsonl", ".ndjson", ".json", ".parquet")
"""Of files whose rows are read."""

PART = r"^[A-Za-z0-9_][A-Za-z0-9_.+-]{0,99}$"
"""What a subset or a split is called at a hub."""


class HubRows(NamedTuple):
    """One split of a data set at a hub; an empty subset is its only one, or its default. Its text stands where others have a path."""

    name: HubName
    subset: str
    split: str

    def __str__(self) -> str:
        return ":".join([str(self.name), *filter(None, (self.subset, self.split))])


def _path(given: str) -> str:
    """A run is resumed from anywhere: relative paths start at the working folder of its first launch. A name at a hub stays one."""
    path = os.path.expanduser(example(given))
    name = name_of(given)
    if name and (name.is_pinned or not (path.endswith(SUFFIXES) or os.path.exists(path))):
        return given
    return os.path.abspath(path) if given else ""


def _grader(given: str) -> str:
    return given if ":" in given else one_of(given, tuple(GRADERS), ", and no path/to/file.py:function")


class DataSection(Section):
    """A data set of prompts, and the grader that says what a completion is worth."""

    renamed: ClassVar[Mapping[str, str]] = {"verifier": "grader"}

    path: Annotated[str, AfterValidator(_path)]
    """JSONL or Parquet file, or a folder that `datasets` saved; relative paths start at the working folder, ~ is your home. Or its name at
    the hub, openai/gsm8k or openai/gsm8k@REVISION: see docs/tasks.md."""
    subset: str = Field(default="", pattern=rf"^$|{PART}")
    """Which part of a data set at the hub `path` means; empty is its only one, or its default."""
    split: str = Field(default="train", pattern=PART)
    """Which split of a data set at the hub is trained on."""
    eval_path: Annotated[str, AfterValidator(_path)] = ""
    """As `path`, for held-out rows; of a name at the hub the only or default subset, and `eval_split`, or test."""
    eval_split: str = Field(default="", pattern=rf"^$|{PART}")
    """Which split of a data set at the hub is held out: of `eval_path`, else of `path`."""
    eval_rows: int = Field(default=0, ge=0)
    """Rows of `path` that are held out, drawn at random, and always the same; for where nothing else is held out."""
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
        held_out = "eval_path" if self.eval_path else "eval_split"
        if self.eval_source and self.eval_rows:
            raise ValueError(f"eval_rows={self.eval_rows} has no effect beside {held_out}. Give one of them")
        if self.eval_source and os.path.realpath(self.eval_source) == os.path.realpath(self.source):
            same = "path" if self.eval_path else "split"
            raise ValueError(f"{held_out} is {same} itself, so what it holds out is trained on. Set eval_rows instead")
        return self

    @model_validator(mode="after")
    def _names_parts_of_names(self) -> Self:
        """A subset and splits are of a name at the hub."""
        given = [key for key in ("subset", "split") if getattr(self, key) != type(self).model_fields[key].default]
        idle = given if not name_of(self.path) else []
        if self.eval_split and not name_of(self.eval_path or self.path):
            idle = [*idle, "eval_split"]
        if idle:
            where = self.path if idle[0] != "eval_split" else self.eval_path or self.path
            told = f"{idle[0]}={getattr(self, idle[0])}"
            raise ValueError(f"{told} is of a data set at the hub, and {where} is a file or folder. Leave it out")
        return self

    @property
    def hub_rows(self) -> Mapping[str, tuple[HubRows, ...]]:
        """What it takes of the hub, by the key that names it."""
        found: dict[str, tuple[HubRows, ...]] = {}
        if name := name_of(self.path):
            splits = (self.split, self.eval_split) if self.eval_split and not self.eval_path else (self.split,)
            found["path"] = tuple(HubRows(name, self.subset, split) for split in splits)
        if name := name_of(self.eval_path):
            found["eval_path"] = (HubRows(name, "", self.eval_split or "test"),)
        return found

    @property
    def source(self) -> str:
        """The rows of `path`: an absolute path, or the text of a HubRows."""
        found = self.hub_rows.get("path")
        return str(found[0]) if found else self.path

    @property
    def eval_source(self) -> str:
        """The same for held-out rows that are not of `source`; empty where there are none."""
        found = self.hub_rows.get("eval_path" if self.eval_path else "path")
        if self.eval_path:
            return str(found[0]) if found else self.eval_path
        return str(found[-1]) if found and self.eval_split else ""


class TaskSection(Section):
    """One task: `class`, or one of the other KINDS. What it does not say itself it takes from `env`, `rollout` and `reward`."""

    weight: float = Field(default=1.0, ge=0)
    """Its share of all groups is this over the sum of all weights; 0 is only evaluated."""
    target: str = Field(default="", alias="class")
    """Import path of an environment: package.module:Class or path/to/file.py:Class."""
    data: DataSection | None = None
    """A data set with a grader."""
    reasoning_gym: str = ""
    """Name of a task that reasoning-gym generates, such as chain_sum."""
    agent: str = ""
    """As `env.agent`; alone it brings its tasks itself."""
    textarena: str = ""
    """Id of a game of textarena's for one player, such as GuessTheNumber-v0."""
    verifiers: dict[str, Any] = {}
    """A taskset of the library verifiers: `taskset`, `harness` and `python`, see docs/environments.md."""
    kwargs: dict[str, Any] = {}
    """Arguments of the environment's constructor, of reasoning-gym's task, or of textarena's game."""
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
    sources = {n: [k for k in KINDS if getattr(t, "target" if k == "class" else k)] for n, t in tasks.items()}
    for name, found in sources.items():
        if not NAME.fullmatch(name):
            raise ValueError(f"{name!r} can't be a task's name: use letters, digits, and _ . - inside")
        if not found and not tasks[name].agent:
            near = difflib.get_close_matches(name, [other for other in sources if sources[other]], n=1)
            guess = f"Did you mean {near[0]}?" if near else "Give it one of them"
            raise ValueError(f"{name} names none of {', '.join((*KINDS, 'agent'))}. {guess}")
        if len(found) > 1:
            raise ValueError(f"{name} names {' and '.join(found)}: a task has one of them. Make it two tasks")
        if tasks[name].data and (idle := [key for key in ("kwargs", "eval_kwargs") if getattr(tasks[name], key)]):
            raise ValueError(f"{name}.{idle[0]} has no effect beside data. Leave it out")
    if tasks and not sum(task.weight for task in tasks.values()):
        raise ValueError(f"the weights of {', '.join(tasks)} sum to 0, so there is nothing to train on. Give one of them a weight above 0")
    return tasks


Tasks = Annotated[dict[str, TaskSection], AfterValidator(_mixture)]
"""The section `tasks`, as each actor declares it that reads it; without it a job has one task without a name."""


def rewards_of(tasks: Mapping[str, TaskSection], reward: RewardSection) -> dict[str, tuple[str, ...]]:
    """The reward functions of each task."""
    own = {name: reward.targets if task.rewards is None else task.rewards for name, task in tasks.items()}
    return own or {"": reward.targets}
