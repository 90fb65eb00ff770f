"""An environment that asks an actor: its methods are async, so it runs in the env_manager's process and may ask."""

import random

from messages import Grade

from rubato.runtime.actor import ref

ARROWS = {"<": "left", "v": "down", ">": "right", "^": "up"}


class GradedEnv:
    """Say where the arrow points, once. How near the answer comes is for the grader to say."""

    async def reset(self, *, seed: int) -> tuple[str, dict[str, object]]:
        """The same seed shows the same arrow."""
        self._arrow = random.Random(seed).choice(sorted(ARROWS))
        return self._arrow, {}

    async def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, object]]:
        """Ask for the grade of the model's answer: it is the reward, and the episode is over."""
        graded = await ref("grader").ask(Grade(action, ARROWS[self._arrow]), timeout=30)
        return "", graded.score, True, False, {}

    async def close(self) -> None:
        """Nothing to release."""
