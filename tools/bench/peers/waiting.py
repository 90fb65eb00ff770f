"""An environment whose steps take a set time in a worker process: what it is told is of no consequence."""

import time
from typing import Any


class Waiting:
    """`turns` steps of `step_s` seconds each."""

    def __init__(self, turns: int = 4, step_s: float = 0.01) -> None:
        self._turns, self._step_s, self._left = turns, step_s, 0

    def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
        self._left = self._turns
        return f"task {seed}", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        time.sleep(self._step_s)  # noqa: TID251 - stands for the work of an environment, in a process of its own
        self._left -= 1
        return "on", float(len(action) % 2), self._left == 0, False, {}
