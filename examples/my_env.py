"""An environment of your own: rubato launch configs/quickstart.yaml env.class=my_env.py:MyEnv."""

import random


class MyEnv:
    """Say the arrow's direction three times; each right answer gives a third of the reward. Any exception ends one rollout only."""

    ARROWS = {"<": "left", "v": "down", ">": "right", "^": "up"}

    def reset(self, *, seed: int) -> tuple[str, dict[str, object]]:
        """Start an episode: the same seed is the same task."""
        self._chance = random.Random(seed)
        self._turns = 0
        return self._show(), {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, object]]:
        """(observation, reward, terminated, truncated, info) for the text the model answered."""
        self._turns += 1
        right = self.ARROWS[self._arrow] in action
        return self._show(), right / 3, self._turns == 3, False, {}

    def close(self) -> None:
        """Nothing to release."""

    def _show(self) -> str:
        self._arrow = self._chance.choice(sorted(self.ARROWS))
        return self._arrow
