"""What a turn says: its text, what the model reasoned, and its calls of tools; and the tokens that a call begins with."""

import json
import re
from array import array
from collections.abc import Collection
from contextlib import suppress
from itertools import takewhile
from typing import Any, NamedTuple

from rubato.actors.envs.chat import Renderer
from rubato.actors.envs.hosting import is_plain
from rubato.actors.envs.templates import RenderError
from rubato.bus.message import well_formed

MOST_CALLS = 128
"""Of one turn; further ones stay text."""

CALL = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)
THOUGHT = re.compile(r"\A\s*(?:<think>)?(.*?)</think>\s*", re.DOTALL)


class Call(NamedTuple):
    """One call of a tool."""

    id: str
    name: str
    arguments: str
    """A JSON object, as it was sampled."""


class Said(NamedTuple):
    """The parts of a turn."""

    content: str
    reasoning: str
    calls: tuple[Call, ...]

    @property
    def message(self) -> dict[str, Any]:
        """As chat completions have it."""
        told: dict[str, Any] = {"role": "assistant", "content": self.content if self.content or not self.calls else None}
        if self.reasoning:
            told["reasoning_content"] = self.reasoning
        if self.calls:
            told["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}} for call in self.calls
            ]
        return told


def said_in(text: str, number: int, *, most_calls: int = MOST_CALLS) -> Said:
    """The parts of the session's turn `number`, in the form of Hermes and Qwen, with so many calls at most. What is none stays text, for
    the agent to see.
    """
    reasoning = ""
    if thought := THOUGHT.match(text):
        reasoning, text = thought[1].strip(), text[thought.end() :]
    calls, rest, at = list[Call](), list[str](), 0
    for found in CALL.finditer(text) if most_calls else ():
        call = _call(found[1])
        if call is None or len(calls) == most_calls:
            continue
        rest.append(text[at : found.start()])
        at = found.end()
        calls.append(Call(f"call_{number}_{len(calls)}", *call))
    rest.append(text[at:])
    content = "".join(rest)
    return Said(content.strip() if calls else content, reasoning, tuple(calls))


def _call(text: str) -> tuple[str, str] | None:
    """Name and arguments of a call, where `text` is one."""
    with suppress(ValueError, RecursionError):
        told = json.loads(text)
        if isinstance(told, dict) and isinstance(name := told.get("name"), str):
            arguments = told.get("arguments", {})
            if isinstance(arguments, dict) and is_plain(arguments):
                return well_formed(name), well_formed(json.dumps(arguments, ensure_ascii=False, allow_nan=False))
    return None


def opening_of(renderer: Renderer, names: Collection[str]) -> bytes:
    """Token ids that the model's turn begins with where it calls one of the tools `names`, as the renderer writes such calls: as far as
    calls of any of them, with whatever arguments, have the same.

    Raises RenderError, one sentence, where calls are not written, or not in a form that is read here.
    """
    first, last = min(names), max(names)  # what these have in common all in between have
    calls = [_rendered_call(renderer, name, arguments) for name in dict.fromkeys((first, last)) for arguments in ({}, {"x": "x"}, {"y": 1})]
    alike = takewhile(lambda tokens: len({*tokens}) == 1, zip(*(array("i", call) for call in calls), strict=False))
    opening = array("i", (token for token, *_ in alike))
    if not opening:
        raise RenderError("the model's chat template begins each call in another way")
    return opening.tobytes()


def _rendered_call(renderer: Renderer, name: str, arguments: dict[str, Any]) -> bytes:
    """Token ids of a turn that calls a tool, and of what follows it, from where a prompt ends."""
    asked = {"role": "user", "content": "?"}
    call = {"id": "123456789", "type": "function", "function": {"name": name, "arguments": arguments}}
    prompt = renderer.chat([asked])
    whole = renderer.chat([asked, {"role": "assistant", "content": None, "tool_calls": [call]}])
    turn = whole.removeprefix(prompt)
    if len(turn) == len(whole) or [each.name for each in said_in(renderer.decode(turn), 0).calls] != [name]:
        raise RenderError("the model's chat template writes no calls in a form that is known here")
    return turn
