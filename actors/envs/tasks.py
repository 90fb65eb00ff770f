"""The tasks of a config as a manager plays them, each with everything resolved, and the limits that make no sense."""

from collections.abc import Mapping
from typing import NamedTuple

from actors import plugins
from actors.config import RewardSection, RolloutSection
from actors.data.tasks import TaskSection, rewards_of
from actors.envs.hosting import DATA_SETS
from actors.envs.section import EnvSection
from runtime.config import Config as Job

QUICK = ("exact", "number", "places")
"""Graders that answer in microseconds and never hang."""

LIMITS = ("max_turns", "max_new_tokens", "temperature", "stop", "system_prompt")


LEAST_TEMPERATURE = 0.01
"""vLLM raises lower ones to this, and its log-probs would be of a temperature that the config does not name."""


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
        return _with(env, plugins.REASONING, kwargs, {**plugins.load(plugins.REASONING_HELD_OUT), **task.eval_kwargs})
    return _with(env, task.target, task.kwargs, task.eval_kwargs)


def _with(env: EnvSection, target: str, kwargs: Mapping[str, object], eval_kwargs: Mapping[str, object]) -> EnvSection:
    return env.model_copy(update={"target": target, "kwargs": dict(kwargs), "eval_kwargs": dict(eval_kwargs)})


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
