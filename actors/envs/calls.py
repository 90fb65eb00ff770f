"""What a turn says, by its text: what the model reasoned, and its calls of tools, in the form of Hermes and Qwen. For environments too."""

import json
import re
from contextlib import suppress
from typing import Any, NamedTuple

from rubato.actors.envs.hosting import is_plain
from rubato.bus.message import well_formed

MOST_CALLS = 128
"""Of one turn; further ones stay text."""

CALL = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)
BEGUN = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
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
    malformed: tuple[str, ...] = ()
    """What begins as a call and is none. It is a part of the content too."""

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


def said_in(text: str, number: int = 0, *, most_calls: int = MOST_CALLS) -> Said:
    """The parts of a turn, with so many calls at most, whose ids have its `number`. What is none stays text, to be seen."""
    reasoning = ""
    if "</think>" in text and (thought := THOUGHT.match(text)):
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
    malformed = tuple(BEGUN.findall(content)) if most_calls else ()
    return Said(content.strip() if calls else content, reasoning, tuple(calls), malformed)


def _call(text: str) -> tuple[str, str] | None:
    """Name and arguments of a call, where `text` is one."""
    with suppress(ValueError, RecursionError):
        told = json.loads(text)
        return call_of(told.get("name"), told.get("arguments")) if isinstance(told, dict) else None
    return None


def call_of(name: Any, arguments: Any) -> tuple[str, str] | None:
    """Name and arguments of a call, those as JSON, where they are an object or none."""
    arguments = {} if arguments is None else arguments
    if not isinstance(name, str) or not isinstance(arguments, dict) or not is_plain(arguments):
        return None
    with suppress(ValueError, RecursionError):  # NaN, which JSON has not
        return well_formed(name), well_formed(json.dumps(arguments, ensure_ascii=False, allow_nan=False))
    return None
