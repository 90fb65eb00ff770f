"""What is checked of a config's tasks before a job starts: all that they name is there, and the model can be shown each prompt."""

import os
from collections.abc import Mapping
from functools import partial
from heapq import nlargest
from pathlib import Path
from typing import Any

from rubato.actors.config import RolloutSection
from rubato.actors.data.datasets import check_data, is_awaited, read_rows, values_of
from rubato.actors.data.tasks import EXTRA, GRADERS, DataSection, TaskSection
from rubato.actors.envs.chat import TOKEN_BYTES, Renderer, renderer_of
from rubato.actors.envs.games import check_game
from rubato.actors.envs.hosting import flaw_of, normal
from rubato.actors.envs.reasoning import HELD_OUT, generator
from rubato.actors.envs.section import DATA_SETS, Task, resolved
from rubato.runtime.code_search import has_module
from rubato.runtime.config import Config as Job
from rubato.runtime.errors import ConfigError, check_all
from rubato.runtime.importer import check_module

LEAST_TEMPERATURE = 0.01
"""vLLM raises lower ones to this, and its log-probs would be of a temperature that the config does not name."""

LONGEST = 64
"""Prompts, by characters, that are rendered at launch: a longer one in tokens is rarely a shorter one in characters."""

RENDERED = ("renderer", "system_prompt", "chat_template_kwargs", "tools", "stop", "max_turns")
"""Keys of `rollout` that decide how a task is rendered."""


def check_job(job: Job) -> None:
    """Refuse what makes every rollout fail, or gives it to another manager while it runs."""
    limits: RolloutSection = job.section("rollout")
    whole, held = limits.max_len, limits.hold_s
    tasks: Mapping[str, TaskSection] = job.section("tasks")
    for name, task in resolved(tasks, job.section("env"), limits, job.section("reward")).items():
        _check_limits(task, job, trained=_trains(job) and (not tasks or tasks[name].weight > 0))
    if limits.top_p < 1.0:
        raise ValueError(
            f"rollout.top_p is {limits.top_p:g}; it must be 1, since the trainer can't recompute log-probs of a cut distribution: "
            "set rollout.top_p=1, and rollout.temperature below 1 for likelier tokens"
        )
    if job.has("engine") and whole > (most := job.section("engine").max_len):
        raise ValueError(f"rollout.max_len is {whole}; it must be at most engine.max_len, which is {most}")
    if job.has("samples") and held * 3 > (ttl := job.section("samples").ticket_ttl_s):
        raise ValueError(f"rollout.hold_s is {held:g}; it must be at most a third of samples.ticket_ttl_s, which is {ttl:g}")


def _trains(job: Job) -> bool:
    """Whether anything is learned from the rollouts of this job."""
    return "trainer" in job.actors and job.section("train").kind != "scripted" and job.run.steps > 0


def _check_limits(task: Task, job: Job, *, trained: bool) -> None:
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
        raise ValueError(f"{said}: all rollouts of a group would be the same, and nothing is learned from equal rewards. Set it to 1{only}")
    if 0.0 < limits.temperature < LEAST_TEMPERATURE:
        greedy = "" if trained else "0 (greedy) or "
        raise ValueError(f"{said}; it must be {greedy}at least {LEAST_TEMPERATURE:g}")


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
    elif task.textarena:
        try:
            check_game(task.textarena)
        except ConfigError as error:
            raise ConfigError(f"{key}.textarena: {error}") from None
    elif (data := task.data) is not None:
        if data.grader not in GRADERS:
            check_module(data.grader, key=f"{key}.data.grader")
        if data.grader == "math" and not has_module("math_verify"):
            raise ConfigError(f"{key}.data.grader: math needs the package math-verify, which is not installed: {EXTRA}")
        if data.sampler:
            check_module(data.sampler, key=f"{key}.data.sampler")
        if not any(is_awaited(path) for path in (data.source, data.eval_source) if path):  # else it is looked at once that is here
            check_data(data, f"{key}.data")
            check_forms(data)


def check_rendering(config: Any, folder: Path) -> None:
    """The model's tokenizer and chat template render a first prompt and a second turn of each task. Raises ConfigError."""
    model = folder / config.model.path
    if not os.path.isdir(model):  # the engines' check names one that is not there
        return
    renderers: dict[str, Renderer] = {}
    try:
        for task in resolved(config.tasks, config.env, config.rollout, config.reward).values():
            key = repr([getattr(task.rollout, name) for name in RENDERED])
            renderer = renderers[key] = renderers.get(key) or renderer_of(task.rollout, model)
            check_prompts(task, renderer)
    except ValueError as error:
        said = str(error)
        raise ConfigError(said if said.endswith("?") else f"{said}.") from error


def check_forms(data: DataSection) -> None:
    """Raises ConfigError, one sentence, for the first prompt that is neither a text nor chat messages. Blocks: reads the files."""
    for path in filter(None, (data.source, data.eval_source)):
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
        if is_awaited(path):
            continue
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


def advice_on_split(task: Task, section: TaskSection | None) -> str:
    """Sentences for a task whose held-out prompts may be trained on."""
    if section is not None and section.data is not None:
        return (
            f"{task.key}.data has no held-out rows: evaluations show rows that are trained on. "
            "Set its eval_path or eval_split, or eval_rows to hold some of them out (docs/tasks.md)"
        )
    return (
        f"env {task.env.target} has no held-out split: evaluations use other seeds, which may give tasks that are trained on. "
        f"Set {task.key}.eval_kwargs, or declare held_out in the class (docs/embedding.md)"
    )
