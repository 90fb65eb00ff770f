"""What is checked of a config's tasks before a job starts: all that they name is there, and the model can be shown each prompt."""

from collections.abc import Iterable, Mapping
from functools import partial
from heapq import nlargest
from pathlib import Path
from typing import Any

from actors.data.datasets import check_data, read_rows, values_of
from actors.data.tasks import EXTRA, GRADERS, DataSection, TaskSection
from actors.envs.chat import TOKEN_BYTES, Renderer, renderer_of
from actors.envs.hosting import DATA_SETS, flaw_of, normal
from actors.envs.reasoning import HELD_OUT, generator
from actors.envs.tasks import Task
from runtime.errors import ConfigError, check_all
from runtime.importer import check_module, has_module

LONGEST = 64
"""Prompts, by characters, that are rendered at launch: a longer one in tokens is rarely a shorter one in characters."""

RENDERED = ("renderer", "system_prompt", "chat_template_kwargs", "tools", "stop", "max_turns")
"""Keys of `rollout` that decide how a task is rendered."""


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
