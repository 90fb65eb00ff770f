"""The environment where there is none."""

from collections.abc import Mapping
from typing import Any

from rubato.actors.envs.environment import Observation, Step


class OwnTasks:
    """Of agents that bring their tasks: `row` and `seed` say which one is to be done."""

    held_out: Mapping[str, Any] = {}
    inline = True

    def reset(self, *, seed: int) -> tuple[Observation, Mapping[str, Any]]:
        """Nothing to show."""
        return "", {}

    def step(self, action: str) -> Step:
        """No reward but what the agent and reward functions say."""
        return "", 0.0, True, False, {}

    def close(self) -> None: ...
