"""Anthropic's messages: the body of a request, and an answer, whole or as server-sent events. Inside, it is a chat of OpenAI's."""

import json
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import msgspec

from rubato.actors.gateway.chat_api import NumTokens, Stop, Temperature, TopP, forced, most_calls
from rubato.actors.gateway.dialect import (
    MOST_STOPS,
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
    text_of,
    tool,
)
from rubato.actors.gateway.forest import MOST_MESSAGES
from rubato.actors.gateway.session import Answer, Ask, Wanted

BETWEEN = "\n\n"
"""Between two texts of a message that the model did not write."""

TYPES = {401: "authentication_error", 404: "not_found_error", 408: "timeout_error", 413: "request_too_large", 429: "rate_limit_error"}
"""By status."""

STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}

TOO_LONG = "prompt is too long"
"""By which clients know that they have to shorten a conversation."""


class Asked(msgspec.Struct):
    """What of a body is read."""

    messages: Annotated[list[dict[str, Any]], msgspec.Meta(min_length=1, max_length=MOST_MESSAGES)]
    model: str | None = None
    max_tokens: NumTokens | None = None
    system: str | list[dict[str, Any]] | None = None
    stop_sequences: Annotated[list[Stop], msgspec.Meta(max_length=MOST_STOPS)] | None = None
    tools: Annotated[list[dict[str, Any]], msgspec.Meta(max_length=MOST_TOOLS)] | None = None
    tool_choice: dict[str, Any] | None = None
    stream: bool | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    output_config: dict[str, Any] | None = None
    output_format: Any = None
    mcp_servers: Any = None
    container: Any = None
    thread: Any = None

    @property
    def streams(self) -> bool:
        return bool(self.stream)

    @property
    def ask(self) -> Ask:
        if self.thread:
            raise invalid("thread", "no conversation is kept under an id: send the whole of it with every request")
        require_absent({name: getattr(self, name) for name in ("output_format", "mcp_servers", "container")})
        require_absent({"output_config.format": (self.output_config or {}).get("format")})
        choice = self.tool_choice or {}
        kind = choice.get("type", "auto")
        tools = tuple(_tool(each, f"tools[{at}]") for at, each in enumerate(self.tools or ()))
        told = [message for at, each in enumerate(self.messages) for message in _messages(each, f"messages[{at}]")]
        if told and told[-1]["role"] == "assistant":
            raise invalid("messages", "the conversation ends with the model's own turn: say something behind it")
        if system := text_in(self.system, "system", ["text"], BETWEEN):
            told.insert(0, {"role": "system", "content": system})
        return Ask(
            conversation(told, "messages"),
            tools,
            self.max_tokens,
            tuple(self.stop_sequences or ()),
            most_calls=most_calls(none=kind == "none", parallel=choice.get("disable_parallel_tool_use") is not True),
            forced=forced(choice if kind == "tool" else kind, tools, any_of="any"),
            wanted=Wanted(self.temperature, self.top_p),
        )


def _messages(message: dict[str, Any], param: str) -> Iterator[dict[str, Any]]:
    """As chat completions have it: results of tools are messages of their own."""
    role, content = field(message, "role", param), message.get("content")
    if role == "assistant":
        yield _turn(content, f"{param}.content")
    elif role == "system":
        yield {"role": role, "content": text_in(content, f"{param}.content", ["text"], BETWEEN)}
    elif role == "user":
        yield from _said(content, f"{param}.content")
    else:
        raise invalid(f"{param}.role", f"a message's role is one of user, assistant and system, not {role[:80]}")


def _said(content: Any, param: str) -> Iterator[dict[str, Any]]:
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    texts = list[str]()
    for at, part in enumerate(parts):
        where = f"{param}[{at}]" if isinstance(content, list) else param
        if kind_of(part, where) != "tool_result":
            texts.append(text_of(part, where, ["text"]))
            continue
        if texts:
            yield {"role": "user", "content": BETWEEN.join(texts)}
            texts.clear()
        result = text_in(part.get("content"), f"{where}.content", ["text"], BETWEEN)
        yield {"role": "tool", "tool_call_id": field(part, "tool_use_id", where), "content": result}
    if texts or not parts:
        yield {"role": "user", "content": BETWEEN.join(texts)}


def _turn(content: Any, param: str) -> dict[str, Any]:
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    texts, thoughts, calls = list[str](), list[str](), list[dict[str, Any]]()
    for at, part in enumerate(parts):
        where = f"{param}[{at}]" if isinstance(content, list) else param
        match kind_of(part, where):
            case "tool_use":
                calls.append(_call(part, where))
            case "thinking":
                thoughts.append(field(part, "thinking", where))
            case "redacted_thinking":
                pass  # another model's, which none can read
            case _:
                texts.append(text_of(part, where, ["text"]))
    told: dict[str, Any] = {"role": "assistant", "content": "".join(texts) if texts or not calls else None}
    return told | ({"reasoning_content": "".join(thoughts)} if thoughts else {}) | ({"tool_calls": calls} if calls else {})


def _call(part: dict[str, Any], param: str) -> dict[str, Any]:
    if not isinstance(arguments := part.get("input"), dict):
        raise invalid(f"{param}.input", "an object is wanted")
    return {"id": field(part, "id", param), "type": "function", "function": {"name": field(part, "name", param), "arguments": arguments}}


def _tool(told: dict[str, Any], param: str) -> dict[str, Any]:
    kind = kind_of(told, param, "custom") if told.get("type") is not None else "custom"
    if kind != "custom":
        raise invalid(param, f"a tool of type {kind[:80]} can't be had: give one with a name and an input_schema")
    if not isinstance(schema := told.get("input_schema"), dict):
        raise invalid(f"{param}.input_schema", "an object is wanted")
    return tool(param, told.get("name"), told.get("description"), schema)


_asked = msgspec.json.Decoder(Asked)


def asked_in(body: bytes) -> Asked:
    """Raises Refused."""
    return read(_asked, body)


def whole(asked: Asked, answers: Sequence[Answer], head: Head) -> dict[str, Any]:
    """The whole answer."""
    (answer,) = answers
    usage = {"input_tokens": answer.num_prompt, "output_tokens": answer.num_sampled}
    return _message(head) | _end(answer) | {"content": _blocks(answer, head), "usage": usage}


def events(asked: Asked, answers: Sequence[Answer], head: Head) -> Iterator[bytes]:
    """The answer as the events of a stream."""
    (answer,) = answers

    def told(kind: str, **fields: Any) -> bytes:
        return event({"type": kind, **fields}, kind)

    yield told("message_start", message=_message(head) | {"usage": {"input_tokens": answer.num_prompt, "output_tokens": 0}})
    for index, block in enumerate(_blocks(answer, head)):
        match block["type"]:
            case "thinking":
                begun = block | {"thinking": "", "signature": ""}
                deltas = [
                    {"type": "thinking_delta", "thinking": block["thinking"]},
                    {"type": "signature_delta", "signature": block["signature"]},
                ]
            case "tool_use":
                begun = block | {"input": {}}
                deltas = [{"type": "input_json_delta", "partial_json": json.dumps(block["input"], ensure_ascii=False)}]
            case _:
                begun, deltas = block | {"text": ""}, [{"type": "text_delta", "text": block["text"]}]
        yield told("content_block_start", index=index, content_block=begun)
        for delta in deltas:
            yield told("content_block_delta", index=index, delta=delta)
        yield told("content_block_stop", index=index)
    yield told("message_delta", delta=_end(answer), usage={"input_tokens": answer.num_prompt, "output_tokens": answer.num_sampled})
    yield told("message_stop")


def counted(num: int) -> dict[str, int]:
    """The answer of count_tokens."""
    return {"input_tokens": num}


def error(error: Error) -> dict[str, Any]:
    """The body of an error."""
    kind = error.kind if error.kind == "session_over" else TYPES.get(error.status, "api_error" if error.status >= 500 else error.kind)
    why = f"{TOO_LONG}: {error}" if error.code == "context_length_exceeded" else str(error)
    return {"type": "error", "error": {"type": kind, "message": why, "code": error.code}}


def failed(asked: Asked, why: Error, head: Head) -> Iterator[bytes]:
    """The end of a stream that brings no answer."""
    yield event(error(why), "error")


def waiting(asked: Asked, head: Head) -> bytes:
    """A sign of life of a stream."""
    return event({"type": "ping"}, "ping")


def _message(head: Head) -> dict[str, Any]:
    """One of which nothing is said yet."""
    return {
        "id": f"msg_{head.id}",
        "type": "message",
        "role": "assistant",
        "model": head.model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
    }


def _end(answer: Answer) -> dict[str, Any]:
    by_stop = answer.stop and not answer.said.calls
    reason = "stop_sequence" if by_stop else STOP_REASONS.get(answer.finish_reason, "end_turn")
    return {"stop_reason": reason, "stop_sequence": answer.stop if by_stop else None}


def _blocks(answer: Answer, head: Head) -> list[dict[str, Any]]:
    said, found = answer.said, list[dict[str, Any]]()
    if said.reasoning:
        found.append({"type": "thinking", "thinking": said.reasoning, "signature": head.id})
    if said.content:
        found.append({"type": "text", "text": said.content})
    calls = ({"type": "tool_use", "id": call.id, "name": call.name, "input": json.loads(call.arguments)} for call in said.calls)
    return [*found, *calls]
