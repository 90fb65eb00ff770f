"""OpenAI's responses: the body of a request, and an answer, whole or as server-sent events. Inside, it is a chat."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from typing import Annotated, Any

import msgspec

from rubato.actors.gateway.chat_api import NumTokens, Temperature, TopP, forced, most_calls
from rubato.actors.gateway.dialect import (
    MOST_TOOLS,
    Error,
    Head,
    conversation,
    event,
    field,
    invalid,
    kind_of,
    read,
    require_absent,
    text_in,
    tool,
)
from rubato.actors.gateway.forest import MOST_MESSAGES
from rubato.actors.gateway.session import Answer, Ask, Wanted

TEXTS = ("input_text", "output_text", "text", "refusal")
"""Parts that have a text."""

OPTIONAL = frozenset({"web_search", "web_search_2025_08_26", "web_search_preview", "web_search_preview_2025_03_11", "image_generation"})
"""Tools that OpenAI's own servers run, and that clients offer without relying on them: a model that is not shown them does not call them."""

BETWEEN = "\n\n"
"""Between two texts before the conversation."""


class Asked(msgspec.Struct):
    """What of a body is read."""

    input: str | Annotated[list[dict[str, Any]], msgspec.Meta(min_length=1, max_length=MOST_MESSAGES)]
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: NumTokens | None = None
    tools: Annotated[list[dict[str, Any]], msgspec.Meta(max_length=MOST_TOOLS)] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    stream: bool | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    previous_response_id: str | None = None
    conversation: Any = None
    prompt: Any = None
    background: bool | None = None
    text: dict[str, Any] | None = None
    top_logprobs: int | None = None
    metadata: Any = None

    @property
    def streams(self) -> bool:
        return bool(self.stream)

    @property
    def ask(self) -> Ask:
        if self.previous_response_id:
            raise invalid("previous_response_id", "no response is kept under its id: send the whole conversation as input")
        require_absent({name: getattr(self, name) for name in ("conversation", "prompt", "background", "top_logprobs")})
        require_absent({"text.format": (self.text or {}).get("format")}, plain=[{"type": "text"}])
        items: list[dict[str, Any]] = [{"role": "user", "content": self.input}] if isinstance(self.input, str) else self.input
        told = [{"role": "system", "content": self.instructions}] if self.instructions else []
        tools, choice = tuple(_tools(self.tools or ())), self.tool_choice
        if isinstance(choice, dict) and choice.get("type") != "function":
            raise invalid("tool_choice", "of objects only that of a function can be had")
        return Ask(
            conversation(_one_system([*told, *_messages(items)]), "input"),
            tools,
            self.max_output_tokens,
            most_calls=most_calls(none=choice == "none", parallel=self.parallel_tool_calls),
            forced=forced(choice, tools, any_of="required"),
            wanted=Wanted(self.temperature, self.top_p),
        )

    @property
    def namespaces(self) -> Mapping[str, str]:
        """Of the tools that have one."""
        groups = (told for told in self.tools or () if told.get("type") == "namespace")
        return {each["name"]: group["name"] for group in groups for each in group["tools"]}


def _one_system(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """With what comes before the conversation as one message: templates take one at its beginning."""
    num = next((at for at, each in enumerate(messages) if each["role"] not in ("system", "developer")), len(messages))
    if num < 2:
        return messages
    return [{"role": "system", "content": BETWEEN.join(each["content"] for each in messages[:num])}, *messages[num:]]


def _messages(items: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Items as messages of chat completions: what the model wrote in one turn is one message."""
    turn: dict[str, Any] = {}
    for at, item in enumerate(items):
        param = f"input[{at}]"
        kind = kind_of(item, param, "message")
        if kind == "reasoning":
            if thought := _thought(item, param):
                turn["reasoning_content"] = turn.get("reasoning_content", "") + thought
        elif kind == "function_call":
            turn.setdefault("tool_calls", []).append(_call(item, param))
        elif kind == "message" and item.get("role") == "assistant":
            turn["content"] = turn.get("content", "") + text_in(item.get("content"), f"{param}.content", TEXTS)
        else:
            if turn:
                yield _turn(turn)
                turn = {}
            yield _said(item, kind, param)
    if turn:
        yield _turn(turn)


def _turn(turn: dict[str, Any]) -> dict[str, Any]:
    return {"role": "assistant", "content": turn.get("content") or (None if "tool_calls" in turn else ""), **turn}


def _said(item: dict[str, Any], kind: str, param: str) -> dict[str, Any]:
    if kind == "message":
        content = item.get("content")
        if content is None:
            raise invalid(f"{param}.content", "a text, or a list of its parts is wanted")
        return {"role": field(item, "role", param), "content": text_in(content, f"{param}.content", TEXTS)}
    if kind == "function_call_output":
        if item.get("output") is None:
            raise invalid(f"{param}.output", "a text, or a list of its parts is wanted")
        output = text_in(item["output"], f"{param}.output", TEXTS)
        return {"role": "tool", "tool_call_id": field(item, "call_id", param), "content": output}
    raise invalid(param, f"an item of type {kind[:80]} can't be had: messages, function calls, their outputs and reasoning can")


def _call(item: dict[str, Any], param: str) -> dict[str, Any]:
    function = {"name": field(item, "name", param), "arguments": field(item, "arguments", param)}
    return {"id": field(item, "call_id", param), "type": "function", "function": function}


def _thought(item: dict[str, Any], param: str) -> str:
    """Its text, or its summary; one that is encrypted elsewhere has none."""
    told = text_in(item.get("content"), f"{param}.content", ["reasoning_text", "text"])
    return told or text_in(item.get("summary"), f"{param}.summary", ["summary_text"])


def _tools(tools: Sequence[dict[str, Any]], param: str = "tools") -> Iterator[dict[str, Any]]:
    for at, told in enumerate(tools):
        where = f"{param}[{at}]"
        kind = kind_of(told, where)
        if kind == "function":
            yield tool(where, told.get("name"), told.get("description"), told.get("parameters"))
        elif kind == "namespace" and param == "tools":
            field(told, "name", where)
            if not isinstance(within := told.get("tools"), list):
                raise invalid(f"{where}.tools", "a list of functions is wanted")
            yield from _tools(within, f"{where}.tools")
        elif kind not in OPTIONAL or param != "tools":
            raise invalid(where, f"a tool of type {kind[:80]} can't be had: give functions")


_asked = msgspec.json.Decoder(Asked)


def asked_in(body: bytes) -> Asked:
    """Raises Refused."""
    return read(_asked, body)


def whole(asked: Asked, answers: Sequence[Answer], head: Head) -> dict[str, Any]:
    """The whole answer."""
    (answer,) = answers
    is_cut = answer.finish_reason == "length"
    details = {"incomplete_details": {"reason": "max_output_tokens"}} if is_cut else {}
    output, status = _output(asked, answer, head), "incomplete" if is_cut else "completed"
    return _response(asked, head, status) | details | {"output": output, "usage": _usage(answer)}


def events(asked: Asked, answers: Sequence[Answer], head: Head) -> Iterator[bytes]:
    """The answer as the events of a stream."""
    response, numbers = whole(asked, answers, head), count(head.num_waited)

    def told(kind: str, **fields: Any) -> bytes:
        return event({"type": f"response.{kind}", "sequence_number": next(numbers), **fields}, f"response.{kind}")

    yield from _begun(asked, head, numbers)
    for at, item in enumerate(response["output"]):
        place = {"item_id": item["id"], "output_index": at}
        parts = item.get("content", [])
        begun = item | ({"content": []} if parts else {}) | ({"arguments": ""} if "arguments" in item else {})
        yield told("output_item.added", output_index=at, item=begun | ({"status": "in_progress"} if "status" in item else {}))
        for number, part in enumerate(parts):
            spot, kind = place | {"content_index": number}, part["type"]
            more = {"logprobs": []} if kind == "output_text" else {}
            yield told("content_part.added", **spot, part=part | {"text": ""})
            yield told(f"{kind}.delta", **spot, delta=part["text"], **more)
            yield told(f"{kind}.done", **spot, text=part["text"], **more)
            yield told("content_part.done", **spot, part=part)
        if "arguments" in item:
            yield told("function_call_arguments.delta", **place, delta=item["arguments"])
            yield told("function_call_arguments.done", **place, name=item["name"], arguments=item["arguments"])
        yield told("output_item.done", output_index=at, item=item)
    yield told(response["status"], response=response)


def failed(asked: Asked, error: Error, head: Head) -> Iterator[bytes]:
    """The end of a stream that brings no answer."""
    numbers = count(head.num_waited)
    yield from _begun(asked, head, numbers)
    response = _response(asked, head, "failed") | {"error": {"code": error.code, "message": str(error)}}
    yield event({"type": "response.failed", "sequence_number": next(numbers), "response": response}, "response.failed")


def waiting(asked: Asked, head: Head) -> bytes:
    """A sign of life of a stream, which begins with that the response is there. Clients that count events don't take comments for one."""
    kind = "response.in_progress" if head.num_waited else "response.created"
    told = {"type": kind, "sequence_number": head.num_waited, "response": _response(asked, head, "in_progress")}
    return event(told, kind)


def _begun(asked: Asked, head: Head, numbers: Iterator[int]) -> Iterator[bytes]:
    """The first two events, unless signs of life have been the first."""
    for kind in ("response.created", "response.in_progress")[head.num_waited :]:
        yield event({"type": kind, "sequence_number": next(numbers), "response": _response(asked, head, "in_progress")}, kind)


def _response(asked: Asked, head: Head, status: str) -> dict[str, Any]:
    """One with nothing in it yet."""
    return {
        "id": f"resp_{head.id}",
        "object": "response",
        "created_at": head.created,
        "status": status,
        "error": None,
        "incomplete_details": None,
        "model": head.model,
        "output": [],
        "usage": None,
        "instructions": asked.instructions,
        "max_output_tokens": asked.max_output_tokens,
        "metadata": asked.metadata or {},
        "parallel_tool_calls": asked.parallel_tool_calls is not False,
        "previous_response_id": None,
        "store": False,
        "text": {"format": {"type": "text"}},
        "tool_choice": asked.tool_choice or "auto",
        "tools": asked.tools or [],
        "truncation": "disabled",
    }


def _output(asked: Asked, answer: Answer, head: Head) -> list[dict[str, Any]]:
    said, namespaces, found = answer.said, asked.namespaces, list[dict[str, Any]]()
    if said.reasoning:
        parts = [{"type": "reasoning_text", "text": said.reasoning}]
        found.append({"type": "reasoning", "id": f"rs_{head.id}", "summary": [], "content": parts})
    if said.content or not said.calls:
        parts = [{"type": "output_text", "text": said.content, "annotations": [], "logprobs": []}]
        found.append({"type": "message", "id": f"msg_{head.id}", "role": "assistant", "status": "completed", "content": parts})
    for at, call in enumerate(said.calls):
        item = {"type": "function_call", "id": f"fc_{head.id}_{at}", "call_id": call.id, "name": call.name, "arguments": call.arguments}
        space = {"namespace": namespaces[call.name]} if call.name in namespaces else {}
        found.append(item | space | {"status": "completed"})
    return found


def _usage(answer: Answer) -> dict[str, Any]:
    return {
        "input_tokens": answer.num_prompt,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": answer.num_sampled,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": answer.num_prompt + answer.num_sampled,
    }
