"""The environment's section of the config, and its tasks as a manager plays them: each with everything resolved, within limits that make
sense."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field, PlainValidator, model_validator

from rubato.actors import plugins
from rubato.actors.config import RewardSection, RolloutSection, SandboxedSection
from rubato.actors.data.tasks import TaskSection, rewards_of

QUICK = ("exact", "number", "places")
"""Graders that answer in microseconds and never hang."""

LIMITS = ("max_turns", "max_new_tokens", "temperature", "stop", "system_prompt")

DATA_SETS = ("rubato.actors.data.graded_env:DataSetEnv", "rubato.actors.data.graded_env:QuickDataSetEnv")
"""What steps there is the user's grader."""

FIRST_WORKERS, PER_CORE = 2, 4
"""Of `workers: auto`: those that start with the first environment, and the most for each core. Steps that compute gain up to one per core;
those that wait for something else gain beyond."""


def _workers(value: Any) -> Any:
    value = int(value) if isinstance(value, str) and value.isascii() and value.isdigit() else value  # of ${NAME}
    if value == "auto" or (isinstance(value, int) and not isinstance(value, bool) and value >= 1):
        return value
    raise ValueError(f"{value!r} is neither a whole number from 1 on nor auto")


Workers = Annotated[int | Literal["auto"], PlainValidator(_workers)]


class EnvSection(SandboxedSection):
    """The environment: which class, with which arguments, and where its code runs."""

    target: str = Field(default="rubato.actors.envs.frozen_lake:FrozenLakeText", alias="class")
    """Import path: package.module:Class or path/to/file.py:Class."""
    kwargs: dict[str, Any] = {}
    """Arguments of the constructor."""
    eval_kwargs: dict[str, Any] = {}
    """Arguments that replace those above for held-out tasks; empty takes what the class declares as `held_out`."""
    agent: str = ""
    """What takes the turns of each rollout, see docs/agents.md: a function as module:name or path/to/file.py:name, or a command. Empty: the environment's own loop."""
    agent_timeout_s: float = Field(default=600.0, gt=0)
    """Longest that an agent may take for one rollout."""
    concurrency: int = Field(default=64, ge=1)
    """Rollouts in flight per environment manager."""
    isolation: Literal["auto", "inline", "process"] = "auto"
    """inline: in the manager's process; process: in workers that are killed when they hang; auto: inline for async classes only."""
    workers: Workers = "auto"
    """Worker processes per environment manager, where isolation needs them: each plays one step at a time. auto: from 2, one more whenever steps wait, up to `concurrency`, four per core, and what half of the free memory holds."""
    memory_mb: int = Field(default=0, ge=0)
    """Private memory of each worker in MiB; 0 leaves it unbounded."""
    max_processes: int = Field(default=1024, ge=1)
    """Processes and threads that each worker may have, itself included."""
    build_timeout_s: float = Field(default=60.0, gt=0)
    """Longest the import and the constructor may take."""
    reset_timeout_s: float = Field(default=60.0, gt=0)
    """Longest one reset may take."""
    step_timeout_s: float = Field(default=60.0, gt=0)
    """Longest one step may take."""
    reset_tries: int = Field(default=3, ge=1)
    """Tries per rollout, each on a fresh instance."""

    @model_validator(mode="before")
    @classmethod
    def _has_own_tasks(cls, given: Any) -> Any:
        """An agent without an environment brings its tasks."""
        return {"class": plugins.OWN_TASKS, **given} if isinstance(given, dict) and given.get("agent") else given

    def sizes(self, cores: int) -> tuple[int, int]:
        """(first, most) workers of a manager that may use so many cores."""
        if self.workers != "auto":
            return self.workers, self.workers
        most = min(self.concurrency, PER_CORE * cores)
        return min(FIRST_WORKERS, most), most


class Task(NamedTuple):
    """One task with everything resolved."""

    key: str
    """Where the config has it: `env`, or `tasks.NAME`."""
    env: EnvSection
    rollout: RolloutSection
    reward: RewardSection


def resolved(tasks: Mapping[str, TaskSection], env: EnvSection, rollout: RolloutSection, reward: RewardSection) -> dict[str, Task]:
    """By name; a config without `tasks` has one, whose name is empty."""
    if not tasks:
        return {"": Task("env", env, rollout, reward)}
    rewards, env = rewards_of(tasks, reward), plugins.sandboxed(env, tasks)
    found: dict[str, Task] = {}
    for name, task in tasks.items():
        limits = {key: value for key in LIMITS if (value := getattr(task, key)) is not None}
        own = reward.model_copy(update={"functions": rewards[name], "url": ""})
        found[name] = Task(f"tasks.{name}", _env_of(task, env), rollout.model_copy(update=limits), own)
    return found


def _env_of(task: TaskSection, env: EnvSection) -> EnvSection:
    env = env.model_copy(update={"agent": task.agent or env.agent})
    if (data := task.data) is not None:
        quick = data.grader in QUICK
        target = DATA_SETS[quick]
        kwargs = {"path": data.source, "prompt": data.prompt, "answer": data.answer, "grader": data.grader}
        held_out = data.eval_source or (data.source if data.eval_rows else "")
        return _with(env, target, kwargs, {"path": held_out} if held_out else {})
    if task.reasoning_gym:
        kwargs = {**task.kwargs, "name": task.reasoning_gym}
        return _with(env, plugins.REASONING, kwargs, {**plugins.load(plugins.REASONING_HELD_OUT), **task.eval_kwargs})
    if task.textarena:
        return _with(env, plugins.TEXTARENA, {**task.kwargs, "id": task.textarena}, task.eval_kwargs)
    if task.verifiers:
        return _with(env, plugins.VERIFIERS, {**task.kwargs, **task.verifiers}, task.eval_kwargs)
    return _with(env, task.target or plugins.OWN_TASKS, task.kwargs, task.eval_kwargs)


def _with(env: EnvSection, target: str, kwargs: Mapping[str, object], eval_kwargs: Mapping[str, object]) -> EnvSection:
    return env.model_copy(update={"target": target, "kwargs": dict(kwargs), "eval_kwargs": dict(eval_kwargs)})
