"""The tasks of a config as a manager plays them, each with everything resolved, and what is checked of them before a job starts."""

from collections.abc import Iterable, Mapping
from functools import partial
from heapq import nlargest
from pathlib import Path
from typing import Any, NamedTuple

from actors.config import RewardSection, RolloutSection
from actors.data.datasets import check_data, read_rows, values_of
from actors.data.tasks import EXTRA, GRADERS, DataSection, TaskSection, rewards_of
from actors.envs.chat import TOKEN_BYTES, Renderer
from actors.envs.hosting import DATA_SETS, flaw_of, normal
from actors.envs.named_renderer import renderer_of
from actors.envs.reasoning import HELD_OUT, generator
from actors.envs.section import EnvSection
from runtime.config import Config as Job
from runtime.errors import ConfigError, check_all
from runtime.importer import check_module, has_module

QUICK = ("exact", "number", "places")
"""Graders that answer in microseconds and never hang."""

LONGEST = 64
"""Prompts, by characters, that are rendered at launch: a longer one in tokens is rarely a shorter one in characters."""

LIMITS = ("max_turns", "max_new_tokens", "temperature", "stop", "system_prompt")


LEAST_TEMPERATURE = 0.01
"""vLLM raises lower ones to this, and its log-probs would be of a temperature that the config does not name."""

RENDERED = ("renderer", "system_prompt", "chat_template_kwargs", "tools", "stop", "max_turns")
"""Keys of `rollout` that decide how a task is rendered."""


class Task(NamedTuple):
    """One task with everything resolved."""

    key: str
    """Where the config has it: `env`, or `tasks.NAME`."""
    env: EnvSection
    rollout: RolloutSection
    reward: RewardSection


def resolved(
    tasks: Mapping[str, TaskSection], env: EnvSection, rollout: RolloutSection, reward: RewardSection
) -> dict[str, Task]:
    """By name; a config without `tasks` has one, whose name is empty."""
    if not tasks:
        return {"": Task("env", env, rollout, reward)}
    rewards = rewards_of(tasks, reward)
    found: dict[str, Task] = {}
    for name, task in tasks.items():
        limits = {key: value for key in LIMITS if (value := getattr(task, key)) is not None}
        own = reward.model_copy(update={"functions": rewards[name], "url": ""})
        found[name] = Task(f"tasks.{name}", _env_of(task, env), rollout.model_copy(update=limits), own)
    return found


def _env_of(task: TaskSection, env: EnvSection) -> EnvSection:
    if (data := task.data) is not None:
        quick = data.grader in QUICK
        target = DATA_SETS[quick]
        kwargs = {"path": data.path, "prompt": data.prompt, "answer": data.answer, "grader": data.grader}
        held_out = data.eval_path or (data.path if data.eval_rows else "")
        return _with(env, target, kwargs, {"path": held_out} if held_out else {})
    if task.reasoning_gym:
        kwargs = {**task.kwargs, "name": task.reasoning_gym}
        return _with(env, "actors.envs.reasoning:ReasoningGymEnv", kwargs, {**HELD_OUT, **task.eval_kwargs})
    return _with(env, task.target, task.kwargs, task.eval_kwargs)


def _with(env: EnvSection, target: str, kwargs: Mapping[str, object], eval_kwargs: Mapping[str, object]) -> EnvSection:
    return env.model_copy(update={"target": target, "kwargs": dict(kwargs), "eval_kwargs": dict(eval_kwargs)})


def check_tasks(tasks: Mapping[str, TaskSection]) -> None:
    """Look for everything that the tasks name. Raises ConfigError with a sentence for each mistake. Blocks: reads data files."""
    check_all(partial(_check_task, f"tasks.{name}", task) for name, task in tasks.items())


def _check_task(key: str, task: TaskSection) -> None:
    if task.target:
        check_module(task.target, key=f"{key}.class")
    elif task.reasoning_gym:
        try:
            for kwargs in (task.kwargs, task.kwargs | task.eval_kwargs):
                generator(task.reasoning_gym, **{key: value for key, value in kwargs.items() if key not in HELD_OUT})
        except ConfigError as error:
            raise ConfigError(f"{key}.reasoning_gym: {error}") from None
    elif (data := task.data) is not None:
        if data.grader not in GRADERS:
            check_module(data.grader, key=f"{key}.data.grader")
        if data.grader == "math" and not has_module("math_verify"):
            raise ConfigError(f"{key}.data.grader: math needs the package math-verify, which is not installed: {EXTRA}")
        if data.sampler:
            check_module(data.sampler, key=f"{key}.data.sampler")
        check_data(data, f"{key}.data")
        check_forms(data)


def check_rendering(tasks: Iterable[Task], model: Path) -> None:
    """Render the prompts of `tasks` with the model in this folder; see `check_prompts`. Raises ConfigError."""
    renderers: dict[str, Renderer] = {}
    try:
        for task in tasks:
            key = repr([getattr(task.rollout, name) for name in RENDERED])
            renderer = renderers[key] = renderers.get(key) or renderer_of(task.rollout, model)
            check_prompts(task, renderer)
    except ValueError as error:
        said = str(error)
        raise ConfigError(said if said.endswith("?") else f"{said}.") from error


def check_forms(data: DataSection) -> None:
    """Raises ConfigError, one sentence, for the first prompt that is neither a text nor chat messages. Blocks: reads the files."""
    for path in filter(None, (data.path, data.eval_path)):
        for number, prompt in enumerate(values_of(path, data.prompt), 1):
            if flaw := flaw_of(prompt):
                raise ConfigError(f"data file {path}: row {number}'s {data.prompt} is wrong: {flaw}.")


def check_prompts(task: Task, renderer: Renderer) -> None:
    """Render the first and the longest prompts of a task's data set. Raises ConfigError, one sentence, for one that can't be, or that leaves
    no room for a turn. Blocks: reads data files.
    """
    if task.env.target not in DATA_SETS:
        return
    limits, column = task.rollout, task.env.kwargs["prompt"]
    room = limits.max_len - limits.max_new_tokens
    for path in dict.fromkeys(each["path"] for each in (task.env.kwargs, task.env.eval_kwargs) if each):
        sizes = [_size_of(prompt) for prompt in values_of(path, column)]
        longest = nlargest(LONGEST, range(len(sizes)), key=sizes.__getitem__)
        for row in dict.fromkeys((0, *longest)):
            where = f"data file {path}: row {row + 1}'s {column}"
            try:
                tokens = len(renderer.opening(normal(read_rows(path)[row][column]))) // TOKEN_BYTES
            except ValueError as error:
                raise ConfigError(f"{where} can't be shown to the model: {str(error).rstrip('.')}.") from error
            if tokens > room:
                raise ConfigError(
                    f"{where} has {tokens:,} tokens as the model sees it; with {task.key}'s max_new_tokens, {limits.max_new_tokens:,}, that "
                    f"is beyond rollout.max_len, {limits.max_len:,}. Leave such rows out, or raise rollout.max_len."
                )


def _size_of(prompt: Any) -> int:
    return len(prompt if isinstance(prompt, str) else str(prompt))


def trains(job: Job) -> bool:
    """Whether anything is learned from the rollouts of this job."""
    return "trainer" in job.actors and job.section("train").kind != "scripted" and job.run.steps > 0


def check_limits(task: Task, job: Job, *, trained: bool) -> None:
    """Raises ValueError for limits that make every rollout of it fail, or all of a group the same where that is to teach something."""
    own, limits, plain = task.key if task.key != "env" else "rollout", task.rollout, task.key == "env"
    if task.reward.targets and "reward_service" not in job.actors:
        key = ("reward.functions" if task.reward.functions else "reward.url") if plain else f"{own}.rewards"
        raise ValueError(f"{key} names {task.reward.targets[0]}, but actors has no reward_service to call it")
    if limits.max_new_tokens >= limits.max_len:
        said = f"{own}.max_new_tokens is {limits.max_new_tokens}"
        raise ValueError(f"{said}; it must be below rollout.max_len, which is {limits.max_len}")
    said = f"{own}.temperature is {limits.temperature:g}"
    if trained and limits.temperature == 0.0:
        only = "" if plain else f", or {own}.weight to 0 if it is only to be evaluated"
        raise ValueError(
            f"{said}: all rollouts of a group would be the same, and nothing is learned from equal rewards. Set it to 1{only}"
        )
    if 0.0 < limits.temperature < LEAST_TEMPERATURE:
        greedy = "" if trained else "0 (greedy) or "
        raise ValueError(f"{said}; it must be {greedy}at least {LEAST_TEMPERATURE:g}")


def advice_on_split(task: Task, section: TaskSection | None) -> str:
    """Sentences for a task whose held-out prompts may be trained on."""
    if section is not None and section.data is not None:
        return (
            f"{task.key}.data has no held-out rows: evaluations show rows that are trained on. "
            "Set its eval_path, or eval_rows to hold some of them out (docs/tasks.md)"
        )
    return (
        f"env {task.env.target} has no held-out split: evaluations use other seeds, which may give tasks that are trained on. "
        f"Set {task.key}.eval_kwargs, or declare held_out in the class (docs/embedding.md)"
    )
