"""An environment and a reward that take a set time each, and nothing of the machine."""

import asyncio
from typing import Any


class Pausing:
    """One turn, after a reset of `reset_s` seconds."""

    def __init__(self, reset_s: float = 0.0, judge_s: float = 0.0) -> None:
        self._reset_s, self._judge_s = reset_s, judge_s

    async def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
        await asyncio.sleep(self._reset_s)
        return f"task {seed}", {"judge_s": self._judge_s}

    async def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        return "", float(len(action) % 2), True, False, {}

    async def close(self) -> None:
        """Nothing is open."""


async def judge(completions: list[str], judge_s: list[float], **columns: Any) -> list[float]:
    """A call takes as long for one as for all."""
    await asyncio.sleep(max(judge_s))
    return [0.0] * len(completions)
