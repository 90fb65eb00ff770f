"""An environment that takes the time, and shows the tokens, that a workload says."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from sim.workload import TaskSpec, episode, task_of

WORD = "a"
"""One token of the toy tokenizer."""

OPENING_TOKENS, FOLLOW_UP_TOKENS = 1, 2
"""What the toy chat template adds to an observation: its end, and after a turn without a stop token that turn's end."""


class ModelledEnv:
    """`tasks` are TaskSpecs as plain data; `seed` is the job's. Plays the very episode that the modelled job draws for a trajectory."""

    def __init__(self, tasks: Sequence[Mapping[str, Any]], seed: int) -> None:
        self._tasks = [TaskSpec.model_validate(task) for task in tasks]
        self._seed = seed

    async def reset(self, *, seed: int) -> tuple[str, Mapping[str, Any]]:
        """A manager names each rollout's task after itself and the trajectory: env_manager-1.g00000001.0."""
        rollout = asyncio.current_task()
        name = rollout.get_name().partition(".")[2] if rollout is not None else str(seed)
        task = task_of(self._tasks, self._seed, name.rpartition(".")[0])
        self._episode = episode(task, self._seed, name)
        self._turn = 0
        for seconds in self._episode.resets_s:
            await asyncio.sleep(seconds)
        return _words(self._episode.turns[0].shown - OPENING_TOKENS), {}

    async def step(self, action: str) -> tuple[str, float, bool, bool, Mapping[str, Any]]:
        turn = self._episode.turns[self._turn]
        await asyncio.sleep(turn.step_s)
        self._turn += 1
        if self._turn == len(self._episode.turns):
            return "", 1.0, True, False, {}
        return _words(self._episode.turns[self._turn].shown - FOLLOW_UP_TOKENS), 0.0, False, False, {}

    def close(self) -> None:
        """Nothing is held."""


def _words(num: int) -> str:
    return " ".join([WORD] * max(1, num))
