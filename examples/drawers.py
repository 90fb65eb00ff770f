"""An agent of Pydantic AI and its task: rubato launch configs/agent.yaml. Any framework's agent is run so; see docs/agents.md."""

import random
from typing import Any

from pydantic_ai import Agent, RunContext, UnexpectedModelBehavior, UsageLimitExceeded, UsageLimits
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth")
WORDS = ("apple", "brush", "candle", "drum", "egg", "flute", "glove", "hammer", "iron", "jar", "key", "lamp", "map", "nail", "oar", "pen")

agent = Agent(deps_type=list[str])


@agent.tool
def open_drawer(drawers: RunContext[list[str]], number: int) -> str:
    """What lies in a drawer, from 1 to 8."""
    return drawers.deps[number - 1] if 1 <= number <= len(drawers.deps) else "nothing"


async def play(task: Any) -> str:
    """The agent's answer: `env.agent=examples/drawers.py:play`."""
    model = OpenAIChatModel(task.model, provider=OpenAIProvider(base_url=task.base_url, api_key=task.api_key))
    try:
        run = await agent.run(task.prompt, model=model, deps=task.info["drawers"], usage_limits=UsageLimits(request_limit=4))
    except (UnexpectedModelBehavior, UsageLimitExceeded):
        return ""
    return run.output


class Drawers:
    """Say what lies in a drawer, or, where a note lies there, in the one that the note names."""

    held_out: dict[str, object] = {}  # another seed is another task

    def reset(self, *, seed: int) -> tuple[str, dict[str, object]]:
        """The prompt names a drawer."""
        chance = random.Random(seed)
        drawers: list[str] = chance.sample(WORDS, len(ORDINALS))
        asked, noted = chance.sample(range(len(ORDINALS)), 2)
        self._wanted = drawers[asked]
        if chance.random() < 0.5:
            self._wanted, drawers[asked] = drawers[noted], f"see {ORDINALS[noted]}"
        return ORDINALS[asked], {"drawers": drawers}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, object]]:
        """One point for the right word."""
        return "", float(action.strip() == self._wanted), True, False, {}

    def close(self) -> None:
        """Nothing to release."""
