"""OpenAI's chat completions: the body of a request, and an answer, whole or as server-sent events."""

from collections.abc import Iterator
from typing import Annotated, Any

import msgspec

from rubato.actors.envs.hosting import flaw_of, normal
from rubato.actors.gateway.forest import MOST_MESSAGES
from rubato.actors.gateway.session import Answer, Ask, Refused
from rubato.bus.message import unpack_f32, unpack_i32

ROLES = ("system", "developer", "user", "assistant", "tool")

NumTokens = Annotated[int, msgspec.Meta(ge=1, lt=2**31)]


class StreamOptions(msgspec.Struct):
    include_usage: bool = False


class Asked(msgspec.Struct):
    """What of a body is read; how the run samples is its config's, whatever temperature a client names."""

    messages: Annotated[list[dict[str, Any]], msgspec.Meta(min_length=1, max_length=MOST_MESSAGES)]
    model: str | None = None
    max_tokens: NumTokens | None = None
    max_completion_tokens: NumTokens | None = None
    stop: str | Annotated[list[str], msgspec.Meta(max_length=16)] | None = None
    tools: Annotated[list[dict[str, Any]], msgspec.Meta(max_length=256)] | None = None
    tool_choice: Any = None
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: Any = None
    logit_bias: dict[str, Any] | None = None
    logprobs: bool | None = None
    return_token_ids: bool | None = None

    def ask(self) -> Ask:
        """Raises Refused for what would change the answer and can't be had."""
        if self.n not in (None, 1):
            raise _invalid("n", f"n={self.n} can't be had: a session's request has one answer")
        if self.tool_choice not in (None, "auto") and not (self.tool_choice == "none" and not self.tools):
            raise _invalid("tool_choice", "tool_choice can't be had but as auto")
        if self.response_format not in (None, {"type": "text"}):
            raise _invalid("response_format", "response_format can't be had but as text")
        if self.logit_bias:
            raise _invalid("logit_bias", "logit_bias can't be had")
        if flaw := flaw_of(self.messages):
            raise _invalid("messages", flaw)
        if strange := [role for message in self.messages if (role := message["role"]) not in ROLES]:
            raise _invalid("messages", f"a message's role is one of {', '.join(ROLES)}, not {strange[0][:80]}")
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        messages: Any = normal(self.messages)
        return Ask(messages, tuple(self.tools or ()), self.max_completion_tokens or self.max_tokens, stop)


def _invalid(param: str, why: str) -> Refused:
    return Refused(400, "invalid_request_error", f"{param}: {why}")


_asked = msgspec.json.Decoder(Asked)


def asked_in(body: bytes) -> Asked:
    """Raises Refused."""
    try:
        return _asked.decode(body)
    except msgspec.MsgspecError as error:
        raise Refused(400, "invalid_request_error", f"this is no chat that can be answered here: {error}") from None


def completion(asked: Asked, answer: Answer, *, created: int, model: str) -> dict[str, Any]:
    """The whole answer."""
    choice: dict[str, Any] = {"index": 0, "message": answer.said.message, "finish_reason": answer.finish_reason}
    if asked.logprobs:
        choice["logprobs"] = _logprobs(answer)
    if asked.return_token_ids:
        choice["token_ids"] = unpack_i32(answer.completion.tokens.ids)
    told = _head(answer, "chat.completion", created, model) | {"choices": [choice], "usage": _usage(answer)}
    if asked.return_token_ids:
        told["prompt_token_ids"] = unpack_i32(answer.prompt)
    return told


def events(asked: Asked, answer: Answer, *, created: int, model: str) -> Iterator[bytes]:
    """The answer as the events of a stream."""
    head, message = _head(answer, "chat.completion.chunk", created, model), answer.said.message

    def chunk(delta: dict[str, Any], finish_reason: str | None = None) -> bytes:
        return event(head | {"choices": [{"index": 0, "delta": delta, "finish_reason": finish_reason}]})

    yield chunk({"role": "assistant", "content": ""})
    if reasoning := message.get("reasoning_content"):
        yield chunk({"reasoning_content": reasoning})
    if message["content"]:
        yield chunk({"content": message["content"]})
    for index, call in enumerate(message.get("tool_calls", ())):
        yield chunk({"tool_calls": [{"index": index, **call}]})
    yield chunk({}, answer.finish_reason)
    if asked.stream_options is not None and asked.stream_options.include_usage:
        yield event(head | {"choices": [], "usage": _usage(answer)})
    yield b"data: [DONE]\n\n"


def event(told: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + msgspec.json.encode(told) + b"\n\n"


def _head(answer: Answer, kind: str, created: int, model: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{answer.completion.request_id}", "object": kind, "created": created, "model": model}


def _usage(answer: Answer) -> dict[str, int]:
    return {
        "prompt_tokens": answer.num_prompt,
        "completion_tokens": answer.num_sampled,
        "total_tokens": answer.num_prompt + answer.num_sampled,
    }


def _logprobs(answer: Answer) -> dict[str, Any]:
    tokens = answer.completion.tokens
    pairs = zip(unpack_i32(tokens.ids), unpack_f32(tokens.logprobs), strict=True)
    return {"content": [{"token": f"token_id:{token}", "logprob": value, "bytes": None, "top_logprobs": []} for token, value in pairs]}
