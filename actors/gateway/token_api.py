"""Tokens in, tokens out over HTTP, as vLLM speaks it: the bodies of one route, for who asks and for who answers.

    POST /inference/v1/generate   GenerateTokens → GeneratedTokens

With `stream` the answer is server-sent events: each a GeneratedTokens with what is new of its choices, the last one `[DONE]`. What goes
wrong is `{"error": {"message": …}}`, as the whole answer or as an event. Fields that stand for nothing here are passed over on the way in.
"""

from collections.abc import AsyncGenerator, AsyncIterable
from typing import Annotated, Any

import msgspec

PATH = "/inference/v1/generate"

MOST_BYTES = 16 * 1024 * 1024
"""Of a body, and of one event: 100 000 tokens with their log-probabilities."""

TokenId = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]


class SamplingParams(msgspec.Struct, frozen=True):
    """How the tokens of one request are drawn, by vLLM's names."""

    max_tokens: Annotated[int, msgspec.Meta(ge=1, lt=2**31)] | None = None
    """None: as many as the server gives."""
    temperature: Annotated[float, msgspec.Meta(ge=0)] = 1.0
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] = 1.0
    seed: int | None = None
    stop_token_ids: list[TokenId] | None = None
    ignore_eos: bool = False
    logprobs: int | None = None
    """0: of the sampled token alone."""
    detokenize: bool = True
    n: Annotated[int, msgspec.Meta(ge=1)] = 1


class GenerateTokens(msgspec.Struct, frozen=True, omit_defaults=True):
    """What is asked."""

    token_ids: Annotated[list[TokenId], msgspec.Meta(min_length=1)]
    sampling_params: SamplingParams
    request_id: str = ""
    model: str | None = None
    cache_salt: str | None = None
    """Only requests of the same salt share what is cached of their prompts."""
    stream: bool = False


class TokenLogprob(msgspec.Struct, frozen=True, omit_defaults=True):
    """One sampled token."""

    token_id: TokenId
    logprob: float
    rank: int | None = None
    token: str = ""
    """Its text where it is told as one: token_id:N."""


class TokenLogprobs(msgspec.Struct, frozen=True):
    """One entry for each sampled token."""

    content: list[TokenLogprob] | None = None


class WeightVersion(msgspec.Struct, frozen=True):
    """Tokens [start, end) were sampled under the weights that were told to be `version`."""

    version: str
    start: int
    end: int


class TokensChoice(msgspec.Struct, frozen=True, omit_defaults=True):
    """One completion, or what is new of it."""

    index: int
    token_ids: list[TokenId] | None = None
    logprobs: TokenLogprobs | None = None
    finish_reason: str | None = None
    """stop, length, abort or error."""
    weight_versions: list[WeightVersion] | None = None
    """Of the whole completion, once it is over."""


class GeneratedTokens(msgspec.Struct, frozen=True, omit_defaults=True):
    """What is answered."""

    choices: list[TokensChoice] = []
    request_id: str = ""
    model: str | None = None
    error: Any = None


class TokensRefused(Exception):
    """The server said in one sentence why there is no answer."""


_encode = msgspec.json.Encoder().encode
_asked = msgspec.json.Decoder(GenerateTokens)
_answered = msgspec.json.Decoder(GeneratedTokens)


def asked(body: bytes) -> GenerateTokens:
    """Of a server. Raises ValueError, one sentence, for what is no such body."""
    if len(body) > MOST_BYTES:
        raise ValueError(f"the body has {len(body)} bytes, more than {MOST_BYTES}")
    return _asked.decode(body)


def answered(body: bytes) -> GeneratedTokens:
    """Of a client: an answer or one event of it. Raises TokensRefused for an error, and for what is neither."""
    try:
        found = _answered.decode(body)
    except msgspec.MsgspecError as error:
        raise TokensRefused(f"its answer is none of {PATH}: {error}") from None
    if found.error is not None:
        raise TokensRefused(said(found.error))
    return found


def said(error: Any) -> str:
    """The sentence in an error of this kind of server, or what there is in its place; of a bounded length."""
    if isinstance(error, dict):
        error = next((error[key] for key in ("message", "error", "detail") if key in error), error)
        return said(error)
    return " ".join(str(error).split())[:500] or "it did not say why"


def body_of(message: GenerateTokens | GeneratedTokens) -> bytes:
    """A body as it travels."""
    return _encode(message)


def event(message: GeneratedTokens | None) -> bytes:
    """One event of a stream; None: the last."""
    return b"data: " + (b"[DONE]" if message is None else _encode(message)) + b"\n\n"


async def events(chunks: AsyncIterable[bytes]) -> AsyncGenerator[GeneratedTokens, None]:
    """Events of a stream, up to the last. Raises TokensRefused for an error, for what is no event, and where the stream ends before it."""
    rest = b""
    async for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        if len(rest) > MOST_BYTES:
            raise TokensRefused(f"an event of its answer has more than {MOST_BYTES} bytes")
        for line in lines:
            if not line.startswith(b"data:"):
                continue
            told = line[5:].strip()
            if told == b"[DONE]":
                return
            yield answered(told)
    raise TokensRefused("its answer broke off")
