"""A data set with a grader as an environment: the prompt is the observation, the grader's number the reward."""

import inspect
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any

from rubato.actors.data.datasets import columns_of, read_rows
from rubato.actors.data.tasks import GRADERS
from rubato.actors.envs.environment import Observation, Step
from rubato.runtime.importer import load_object
from rubato.runtime.pool.values import taken_by


class DataSetEnv:
    """One row per trajectory; see actors/data/graders.py for what a grader may answer."""

    def __init__(self, *, path: str, prompt: str, answer: str, grader: str) -> None:
        self._path = path
        self._prompt = prompt
        self._answer = answer
        self._grade: Callable[..., Any] = load_object(GRADERS.get(grader, grader))
        self._takes = taken_by(partial(self._grade, "", ""))
        self._positional = {*taken_by(self._grade)} - {*self._takes}
        self._row: dict[str, Any] = {}
        self._told: Mapping[str, Any] = {}
        self._turn = 0

    def reset(
        self, *, seed: int, task: str, row: int, purpose: str, trajectory: str, version: int
    ) -> tuple[Observation, Mapping[str, Any]]:
        """Show the prompt of `row`; the info has its columns, for reward functions: None where other rows have one that it lacks."""
        self._row = {**dict.fromkeys(columns_of(self._path)), **read_rows(self._path)[row]}
        self._turn = 0
        told = {"task": task, "row": row, "purpose": purpose, "trajectory": trajectory, "version": version}
        self._told = {key: value for key, value in (self._row | told).items() if key not in self._positional}
        return self._row[self._prompt], self._row

    def step(self, action: str) -> Step | Awaitable[Step]:
        """What the grader says, where it is async once that is awaited; the end, unless it replies."""
        self._turn += 1
        told = {**self._told, "turn": self._turn}
        named = {key: value for key, value in told.items() if key in self._takes or "**" in self._takes}
        found = self._grade(action, self._row[self._answer], **named)
        return _awaited(found) if inspect.isawaitable(found) else _step(found)

    def close(self) -> None:
        """Nothing to release."""


async def _awaited(found: Awaitable[Any]) -> Step:
    return _step(await found)


def _step(found: Any) -> Step:
    worth, reply = found if isinstance(found, tuple) else (found, "")
    return reply, worth, not reply, False, {}


class QuickDataSetEnv(DataSetEnv):
    """With one of the graders that may run in the manager's own process."""

    inline = True
