"""OpenAI's chat completions: the body of a request, and an answer, whole or as server-sent events."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

import msgspec

from rubato.actors.envs.calls import MOST_CALLS
from rubato.actors.envs.hosting import is_plain
from rubato.actors.gateway.dialect import (
    MOST_STOPS,
    MOST_TOOLS,
    ROLES,
    STOP_LENGTH,
    UNREADABLE,
    Head,
    conversation,
    event,
    invalid,
    kind_of,
    read,
    require_absent,
    tool,
)
from rubato.actors.gateway.forest import MOST_MESSAGES, Message, Written
from rubato.actors.gateway.session import MOST_AT_ONCE, Answer, Ask, Wanted
from rubato.bus.message import unpack_f32, unpack_i32

NumTokens = Annotated[int, msgspec.Meta(ge=1, lt=2**31)]
Temperature = Annotated[float, msgspec.Meta(ge=0, le=100)]
TopP = Annotated[float, msgspec.Meta(ge=0, le=1)]
TokenId = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
Stop = Annotated[str, msgspec.Meta(min_length=1, max_length=STOP_LENGTH)]


UNAVAILABLE = (
    "logit_bias", "functions", "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar", "bad_words", "ignore_eos",
    "chat_template", "chat_template_kwargs", "continue_final_message", "audio", "web_search_options", "allowed_token_ids", "prompt_logprobs",
    "truncate_prompt_tokens", "documents", "echo",
)  # fmt: skip
"""Fields, of OpenAI's API and of vLLM's, that would change the answer."""


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class Asked(msgspec.Struct):
    """What of a body is read."""

    messages: Annotated[list[msgspec.Raw], msgspec.Meta(min_length=1, max_length=MOST_MESSAGES)]
    model: str | None = None
    max_tokens: NumTokens | None = None
    max_completion_tokens: NumTokens | None = None
    stop: Stop | Annotated[list[Stop], msgspec.Meta(max_length=MOST_STOPS)] | None = None
    tools: Annotated[list[dict[str, Any]], msgspec.Meta(max_length=MOST_TOOLS)] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    n: Annotated[int, msgspec.Meta(ge=1, le=MOST_AT_ONCE)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: Any = None
    logit_bias: Any = None
    functions: Any = None
    function_call: Any = None
    structured_outputs: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    bad_words: Any = None
    min_tokens: Any = None
    ignore_eos: Any = None
    allowed_token_ids: Any = None
    prompt_logprobs: Any = None
    truncate_prompt_tokens: Any = None
    documents: Any = None
    echo: Any = None
    chat_template: Any = None
    chat_template_kwargs: Any = None
    add_generation_prompt: Any = None
    continue_final_message: Any = None
    modalities: Any = None
    audio: Any = None
    web_search_options: Any = None
    stop_token_ids: Annotated[list[TokenId], msgspec.Meta(max_length=MOST_STOPS)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, msgspec.Meta(ge=0, le=20)] | None = None
    return_token_ids: bool | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    seed: int | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None

    @property
    def streams(self) -> bool:
        return bool(self.stream)

    @property
    def ask(self) -> Ask:
        if self.top_logprobs:
            raise invalid("top_logprobs", "only the log-probability of the sampled token is there: leave it out")
        require_absent({"response_format": self.response_format}, plain=[{"type": "text"}])
        require_absent({name: getattr(self, name) for name in UNAVAILABLE})
        require_absent({"function_call": self.function_call}, plain=["none", "auto"])
        require_absent({"modalities": self.modalities}, plain=[["text"]])
        require_absent({"min_tokens": self.min_tokens}, plain=[0])
        if self.add_generation_prompt is False:
            raise invalid("add_generation_prompt", "an answer is a turn of its own: leave it out")
        tools = tuple(_tool(told, f"tools[{at}]") for at, told in enumerate(self.tools or ()))
        choice = self.tool_choice
        if isinstance(choice, dict) and choice.get("type") == "function":  # {"type": "function", "function": {"name": …}}
            choice = choice.get("function") or choice  # or {"type": "function", "name": …}, as responses have it
        return Ask(
            Written([*map(bytes, self.messages)], _message),
            tools,
            self.max_completion_tokens or self.max_tokens,
            (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ()),
            self.n or 1,
            most_calls(none=choice == "none", parallel=self.parallel_tool_calls),
            forced(choice, tools, any_of="required"),
            Wanted(self.temperature, self.top_p, self.seed, bool(self.frequency_penalty or self.presence_penalty)),
            tuple(self.stop_token_ids or ()),
        )


def most_calls(*, none: bool, parallel: bool | None) -> int:
    """Of one turn. Where none is wanted tools are shown all the same, since the history before must stay what it was."""
    return 0 if none else 1 if parallel is False else MOST_CALLS


def forced(choice: Any, tools: Sequence[Mapping[str, Any]], *, any_of: str) -> tuple[str, ...]:
    """Names of the tools of which `choice` wants one to be called: all where it is `any_of`, else that of an object with a name.

    Raises Refused for any other choice but auto and none.
    """
    if choice in (None, "auto", "none"):
        return ()
    names = tuple(told["function"]["name"] for told in tools)
    name = choice.get("name") if isinstance(choice, dict) else None
    if choice != any_of and not isinstance(name, str):
        raise invalid("tool_choice", f"only auto, none, {any_of} and one function by its name can be had")
    if name is not None and name not in names:
        raise invalid("tool_choice", f"there is no tool {name[:80]} among those of the request")
    if not names:
        raise invalid("tool_choice", "without tools none can be called")
    return names if name is None else (name,)


def _tool(told: dict[str, Any], param: str) -> dict[str, Any]:
    kind, function = kind_of(told, param, "function"), told.get("function")
    if kind != "function" or not isinstance(function, dict):
        raise invalid(param, f"a tool of type {kind[:80]} can't be had: {{'type': 'function', 'function': {{'name': …}}}} is wanted")
    if not is_plain(told):
        raise invalid(param, "a tool is a plain object")
    tool(param, function.get("name"), function.get("description"), function.get("parameters"))
    return told  # as its client has it: templates show it whole


_asked, _object = msgspec.json.Decoder(Asked), msgspec.json.Decoder(dict[str, Any])


def _message(written: bytes) -> Message:
    """Raises Refused."""
    try:
        told = _object.decode(written)
    except UNREADABLE as error:
        raise invalid("messages", f"one is none that can be answered here: {error}") from None
    if len(told) == 2 and told.get("role") in ROLES and isinstance(told.get("content"), str):  # most have no more
        return told
    return conversation([told], "messages")[0]


def asked_in(body: bytes) -> Asked:
    """Raises Refused."""
    return read(_asked, body)


def whole(asked: Asked, answers: Sequence[Answer], head: Head) -> dict[str, Any]:
    """The whole answer."""
    told = _head(head, "chat.completion") | {"choices": [_choice(asked, *each) for each in enumerate(answers)], "usage": usage(answers)}
    if asked.return_token_ids:
        told["prompt_token_ids"] = unpack_i32(answers[0].prompt)
    return told


def events(asked: Asked, answers: Sequence[Answer], head: Head) -> Iterator[bytes]:
    """The answer as the events of a stream."""
    shared = _head(head, "chat.completion.chunk")

    def chunk(index: int, delta: dict[str, Any], finish_reason: str | None = None, **more: Any) -> bytes:
        return event(shared | prompt | {"choices": [{"index": index, "delta": delta, "finish_reason": finish_reason, **more}]})

    prompt: dict[str, Any] = {"prompt_token_ids": unpack_i32(answers[0].prompt)} if asked.return_token_ids else {}
    for index, answer in enumerate(answers):
        message = answer.said.message
        yield chunk(index, {"role": "assistant", "content": ""})
        prompt = {}  # the first event alone has it
        if reasoning := message.get("reasoning_content"):
            yield chunk(index, {"reasoning_content": reasoning})
        if message["content"]:
            yield chunk(index, {"content": message["content"]})
        for number, call in enumerate(message.get("tool_calls", ())):
            yield chunk(index, {"tool_calls": [{"index": number, **call}]})
        yield chunk(index, {}, answer.finish_reason, **_tokens(asked, answer))
    if asked.stream_options is not None and asked.stream_options.include_usage:
        yield event(shared | {"choices": [], "usage": usage(answers)})
    yield b"data: [DONE]\n\n"


def usage(answers: Sequence[Answer]) -> dict[str, int]:
    """Tokens of the prompt, and of all answers."""
    prompt, sampled = answers[0].num_prompt, sum(answer.num_sampled for answer in answers)
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}


def _choice(asked: Asked, index: int, answer: Answer) -> dict[str, Any]:
    return {"index": index, "message": answer.said.message, "finish_reason": answer.finish_reason, **_tokens(asked, answer)}


def _head(head: Head, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{head.id}", "object": kind, "created": head.created, "model": head.model}


def _tokens(asked: Asked, answer: Answer) -> dict[str, Any]:
    """A token's text is its id: one that is a piece of a character has none."""
    told = dict[str, Any]()
    if not (asked.logprobs or asked.return_token_ids):
        return told
    tokens = answer.completion.tokens
    ids = unpack_i32(tokens.ids)
    if asked.logprobs:
        pairs = zip(ids, unpack_f32(tokens.logprobs), strict=True)
        shown = [{"token": f"token_id:{token}", "logprob": value, "bytes": None, "top_logprobs": []} for token, value in pairs]
        told["logprobs"] = {"content": shown}
    if asked.return_token_ids:
        told["token_ids"] = ids
    return told
