"""An environment whose steps last as chance will have it, so that messages of many come one by one, as those of many hosts do."""

import asyncio
import random
from collections.abc import Mapping
from typing import Any


class SpreadTurns:
    """Ends after `turns` steps, which last `step_s` on average, exponentially distributed."""

    def __init__(self, *, turns: int, step_s: float) -> None:
        self._turns, self._step_s = turns, step_s
        self._chance, self._left = random.Random(), 0

    async def reset(self, *, seed: int, trajectory: str) -> tuple[str, Mapping[str, Any]]:
        """Draw from the seed of the group and the name of the trajectory."""
        self._chance, self._left = random.Random(f"{seed} {trajectory}"), self._turns
        return "go", {}

    async def step(self, action: str) -> tuple[str, float, bool, bool, Mapping[str, Any]]:
        """Wait for as long as the step lasts."""
        await asyncio.sleep(self._chance.expovariate(1.0 / self._step_s))
        self._left -= 1
        return "go", self._chance.random(), self._left == 0, False, {}

    def close(self) -> None:
        """Nothing to release."""
