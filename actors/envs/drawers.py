"""The task of configs/agent.yaml: an agent with a tool says what lies in a drawer."""

import random
from collections.abc import Mapping
from typing import Any

from rubato.actors.envs.environment import Step

ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth")
WORDS = ("apple", "brush", "candle", "drum", "egg", "flute", "glove", "hammer", "iron", "jar", "key", "lamp", "map", "nail", "oar", "pen")


class Drawers:
    """Say what lies in the drawer that the prompt names, or, where a note lies there, in the one that the note names."""

    held_out: Mapping[str, Any] = {}
    inline = True

    def reset(self, *, seed: int) -> tuple[str, dict[str, Any]]:
        """The prompt is an ordinal; `drawers` of the info are for the agent's tool."""
        chance = random.Random(seed)
        drawers: list[str] = chance.sample(WORDS, len(ORDINALS))
        asked, noted = chance.sample(range(len(ORDINALS)), 2)
        self._wanted = drawers[asked]
        if chance.random() < 0.5:
            self._wanted, drawers[asked] = drawers[noted], f"see {ORDINALS[noted]}"
        return ORDINALS[asked], {"drawers": drawers}

    def step(self, action: str) -> Step:
        """One point for the right word."""
        return "", float(action.strip() == self._wanted), True, False, {}

    def close(self) -> None: ...
