"""Agents of Python frameworks, with one tool each, as commands: `python framework_agents.py KIND`. They know nothing of training."""

import asyncio
import json
import os
import sys
from pathlib import Path


def found_in(place: str) -> str:
    """What lies in a place."""
    return f"{place}: widget-42"


def openai_agents(model, prompt):
    """`model` is a name, which means responses, or a model of chat completions."""
    from agents import Agent, Runner, function_tool

    async def play():
        agent = Agent(name="finder", instructions="Be brief.", tools=[function_tool(found_in)], model=model)
        run = Runner.run_streamed(agent, prompt)
        async for _ in run.stream_events():
            pass
        return run.final_output

    return asyncio.run(play())


def by_responses(task):
    return openai_agents(task["model"], task["prompt"])


def by_chat(task):
    from agents import OpenAIChatCompletionsModel
    from openai import AsyncOpenAI

    return openai_agents(OpenAIChatCompletionsModel(model=task["model"], openai_client=AsyncOpenAI()), task["prompt"])


def by_messages(task):
    import anthropic

    messages, tools = [{"role": "user", "content": task["prompt"]}], [anthropic.beta_tool(found_in)]
    client = anthropic.Anthropic()
    runner = client.beta.messages.tool_runner(
        model=task["model"], max_tokens=512, tools=tools, messages=messages, stream=True, thread=False
    )
    for stream in runner:
        last = stream.get_final_message()
    return last.content[-1].text


if __name__ == "__main__":
    os.environ["OPENAI_AGENTS_DISABLE_TRACING"] = "1"
    answer = globals()[sys.argv[1]](json.loads(Path(os.environ["RUBATO_TASK_FILE"]).read_text()))
    print(json.dumps({"answer": answer}))
