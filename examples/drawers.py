"""An agent of Pydantic AI: rubato launch configs/agent.yaml. Any framework's agent is trained so; see docs/agents.md."""

from typing import Any

from pydantic_ai import Agent, RunContext, UnexpectedModelBehavior, UsageLimitExceeded, UsageLimits
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

agent = Agent(deps_type=list[str])


@agent.tool
def open_drawer(drawers: RunContext[list[str]], number: int) -> str:
    """What lies in a drawer, from 1 to 8."""
    return drawers.deps[number - 1] if 1 <= number <= len(drawers.deps) else "nothing"


async def play(task: Any) -> str:
    """The agent's answer, which its environment scores: `env.agent=examples/drawers.py:play`."""
    model = OpenAIChatModel(task.model, provider=OpenAIProvider(base_url=task.base_url, api_key=task.api_key))
    try:
        run = await agent.run(task.prompt, model=model, deps=task.info["drawers"], usage_limits=UsageLimits(request_limit=4))
    except (UnexpectedModelBehavior, UsageLimitExceeded):
        return ""
    return run.output
