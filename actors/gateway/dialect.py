"""What a dialect of the gateway is: how it reads a request, and how it writes an answer, an error and a stream."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import msgspec

from rubato.actors.envs.hosting import flaw_of, is_plain, normal
from rubato.actors.gateway.forest import Message
from rubato.actors.gateway.session import Answer, Ask, AskTokens, Refused, SessionOver

MOST_TOOLS = 256
"""Of one request."""

MOST_STOPS = 16
"""Texts, each of up to STOP_LENGTH characters, that end a turn."""

STOP_LENGTH = 1024

ROLES = ("system", "user", "assistant", "tool")

Error = SessionOver | Refused

UNREADABLE = (msgspec.MsgspecError, RecursionError, UnicodeDecodeError)
"""What decoding raises where a message is no such thing, is nested too deep, or has texts that are no UTF-8."""


class Asked(Protocol):
    """A request, as its dialect has it."""

    @property
    def ask(self) -> Ask | AskTokens:
        """Raises Refused for what would change the answer and can't be had."""
        ...

    @property
    def streams(self) -> bool: ...

    @property
    def model(self) -> str | None: ...


AskedT = TypeVar("AskedT", bound=Asked)


class Head(NamedTuple):
    """What an answer says of itself."""

    id: str
    created: int
    """Seconds since 1970."""
    model: str
    num_waited: int = 0
    """Signs of life that its stream began with."""


@dataclass(frozen=True)
class Dialect(Generic[AskedT]):
    """One request of one API. All are pure functions."""

    asked_in: Callable[[bytes], AskedT]
    """Of a body. Raises Refused."""
    whole: Callable[[AskedT, Sequence[Answer], Head], Any]
    """The whole answer, as JSON's types."""
    events: Callable[[AskedT, Sequence[Answer], Head], Iterable[bytes]]
    """The answer as the events of a stream, behind `head.num_waited` signs of life."""
    error: Callable[[Error], Any]
    """The body of an error."""
    failed: Callable[[AskedT, Error, Head], Iterable[bytes]]
    """The events by which a stream ends that brings no answer."""
    waiting: Callable[[AskedT, Head], bytes]
    """A sign of life of a stream whose answer is not there yet."""
    counted: Callable[[int], Any] | None = None
    """The answer where tokens of the prompt are counted, and nothing is sampled."""


def invalid(param: str, why: str) -> Refused:
    """What is wrong with one field."""
    return Refused(400, "invalid_request_error", f"{param}: {why}")


def read(decoder: msgspec.json.Decoder[AskedT], body: bytes) -> AskedT:
    """Raises Refused for a body that is none of the decoder's type."""
    try:
        return decoder.decode(whole_pairs(body))
    except UNREADABLE as error:
        raise Refused(400, "invalid_request_error", f"the body is none that can be answered here: {error}") from None


ESCAPED = re.compile(rb"\\(?:u[dD][89abAB]..\\u[dD][c-fC-F]..|(u[dD][89a-fA-F]..)|.)", re.DOTALL)
"""One escape of JSON: a pair of surrogates, one that stands alone, or any other."""


def whole_pairs(body: bytes) -> bytes:
    """JSON whose surrogates that stand alone became U+FFFD, as in texts of environments: JavaScript cuts texts within an emoji."""
    if b"\\ud" not in body and b"\\uD" not in body:
        return body
    return ESCAPED.sub(lambda found: b"\\ufffd" if found[1] else found[0], body)


def require_absent(unavailable: Mapping[str, Any], *, plain: Iterable[Any] = ()) -> None:
    """Raises Refused for the first of these fields that has a value and none of `plain`."""
    for name, value in unavailable.items():
        if value not in (None, False, [], {}, *plain):
            raise invalid(name, "it can't be had here: leave it out")


def conversation(messages: Sequence[Message], param: str) -> list[Message]:
    """Messages of chat completions as templates take them, texts joined. Raises Refused, which names `param`."""
    if flaw := flaw_of(messages):
        raise invalid(param, flaw)
    if strange := [role for message in messages if (role := message["role"]) not in (*ROLES, "developer")]:
        raise invalid(param, f"a message's role is one of {', '.join(ROLES)} and developer, not {strange[0][:80]}")
    found: Any = normal(messages)
    return [{**message, "role": "system"} if message["role"] == "developer" else message for message in found]


def tool(param: str, name: Any, description: Any, parameters: Any) -> dict[str, Any]:
    """A tool as chat completions have it, and templates. Raises Refused, which names `param`."""
    if not isinstance(name, str) or not name:
        raise invalid(param, "a tool needs a name")
    if not isinstance(description, str | None):
        raise invalid(param, f"the description of the tool {name[:80]} is no text")
    if not isinstance(parameters, dict | None) or not is_plain(parameters):
        raise invalid(param, f"the schema of the tool {name[:80]} is no plain object")
    told: dict[str, Any] = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": {key: value for key, value in told.items() if value is not None}}


def text_in(content: Any, param: str, kinds: Sequence[str], joint: str = "") -> str:
    """The text of a content: a string, or parts of these kinds with a text each. Raises Refused, which names the part."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise invalid(param, "content is a text, or a list of its parts")
    return joint.join(text_of(part, f"{param}[{at}]", kinds) for at, part in enumerate(content))


def text_of(part: Any, param: str, kinds: Sequence[str]) -> str:
    """The same of one part."""
    kind = kind_of(part, param)
    if kind not in kinds:
        raise invalid(param, f"a part of type {kind[:80]} can't be had: models here read text alone")
    text = part.get("refusal" if kind == "refusal" else "text")
    if not isinstance(text, str):
        raise invalid(f"{param}.text", "a text part needs a text")
    return text


def kind_of(part: Any, param: str, default: str = "") -> str:
    """The type that an object says it has. Raises Refused."""
    kind = part.get("type", default) if isinstance(part, dict) else None
    if not isinstance(kind, str) or not kind:
        raise invalid(param, "an object with a type is wanted")
    return kind


def field(part: Mapping[str, Any], name: str, param: str) -> str:
    """A text that must be there. Raises Refused."""
    value = part.get(name)
    if not isinstance(value, str):
        raise invalid(f"{param}.{name}", "a text is wanted")
    return value


def event(told: Any, name: str = "") -> bytes:
    """One server-sent event."""
    return (f"event: {name}\n".encode() if name else b"") + b"data: " + msgspec.json.encode(told) + b"\n\n"


def comment(asked: Any, head: Head) -> bytes:
    """A sign of life that no client takes for an event."""
    return b": waiting\n\n"


def openai_error(error: Error) -> dict[str, Any]:
    """As OpenAI's API has errors, and whatever follows it."""
    return {"error": {"type": error.kind, "code": error.code, "message": str(error), "param": None}}


def openai_failed(asked: Any, error: Error, head: Head) -> Iterator[bytes]:
    """The same in a stream."""
    yield event(openai_error(error))
