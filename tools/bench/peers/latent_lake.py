"""FrozenLake whose steps take time: the environment that tools/bench/vs_trl.py gives both sides."""

import asyncio
import itertools
import random
from collections.abc import Mapping
from typing import Any

from rubato.actors.envs.frozen_lake import FrozenLakeText

TAIL_MEDIAN_S, TAIL_SLOW_S, TAIL_SLOW_SHARE = 0.010, 1.0, 0.02


def delay(latency: str, chance: random.Random) -> float:
    """Seconds that one step takes. `tail`: log-normal around 10 ms, and 1 s for one step in fifty."""
    if latency != "tail":
        return {"0": 0.0, "50ms": 0.05}[latency]
    return TAIL_SLOW_S if chance.random() < TAIL_SLOW_SHARE else TAIL_MEDIAN_S * chance.lognormvariate(0.0, 0.5)


class LatentLake:
    """FrozenLakeText with asynchronous steps. The nth instance of a process draws the same delays in every process."""

    held_out = {"split": "eval"}
    numbers = itertools.count()

    def __init__(self, *, latency: str = "0", split: str = "train") -> None:
        self._latency = latency
        self._lake = FrozenLakeText(split=split)  # type: ignore[arg-type]
        self._chance = random.Random(next(self.numbers))

    async def reset(self, *, seed: int) -> tuple[str, Mapping[str, Any]]:
        """Start on the map of `seed`."""
        return self._lake.reset(seed=seed)

    async def step(self, action: str) -> tuple[str, float, bool, bool, Mapping[str, Any]]:
        """Move, after the step's delay."""
        wait_s = delay(self._latency, self._chance)
        if wait_s:
            await asyncio.sleep(wait_s)
        return self._lake.step(action)

    def close(self) -> None:
        """Nothing to release."""
