"""vLLM's tokens in, tokens out (token_api.py), as a session answers it: behind the deepest turn whose kept tokens the prompt begins with."""

from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import msgspec

from rubato.actors.gateway import token_api
from rubato.actors.gateway.chat_api import Stop
from rubato.actors.gateway.dialect import MOST_STOPS, Head, invalid, read, require_absent
from rubato.actors.gateway.session import MOST_AT_ONCE, Answer, AskTokens, Wanted
from rubato.actors.gateway.token_api import (
    GeneratedTokens,
    GenerateTokens,
    TokenId,
    TokenLogprob,
    TokenLogprobs,
    TokensChoice,
    WeightVersion,
)
from rubato.bus.message import pack_i32, unpack_f32, unpack_i32

MOST_STOP_IDS = 256


class Params(token_api.SamplingParams, frozen=True):
    """Those that hold, beside how the run samples, and those that can't be had."""

    stop: Stop | Annotated[list[Stop], msgspec.Meta(max_length=MOST_STOPS)] | None = None
    stop_token_ids: Annotated[list[TokenId], msgspec.Meta(max_length=MOST_STOP_IDS)] | None = None
    min_tokens: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: Any = None
    allowed_token_ids: Any = None
    bad_words: Any = None
    structured_outputs: Any = None


class Asked(GenerateTokens, frozen=True):
    """What of a body is read."""

    sampling_params: Params = msgspec.field(default_factory=Params)
    features: Any = None
    """Of what is no text."""

    @property
    def streams(self) -> bool:
        return self.stream

    @property
    def ask(self) -> AskTokens:
        params = self.sampling_params
        if params.n > MOST_AT_ONCE:
            raise invalid("sampling_params.n", f"a request has at most {MOST_AT_ONCE} answers")
        if params.logprobs not in (None, 0, 1):
            raise invalid("sampling_params.logprobs", "only the log-probability of the sampled token is there: ask for 0")
        unavailable = ("min_tokens", "prompt_logprobs", "logit_bias", "allowed_token_ids", "bad_words", "structured_outputs")
        require_absent({f"sampling_params.{name}": getattr(params, name) for name in unavailable})
        require_absent({"features": self.features})
        return AskTokens(
            pack_i32(self.token_ids),
            params.max_tokens,
            (params.stop,) if isinstance(params.stop, str) else tuple(params.stop or ()),
            tuple(params.stop_token_ids or ()),
            own_ends=params.ignore_eos,
            n=params.n,
            wanted=Wanted(params.temperature, params.top_p, params.seed),
        )


_asked = msgspec.json.Decoder(Asked)


def asked_in(body: bytes) -> Asked:
    """Raises Refused."""
    return read(_asked, body)


def whole(asked: Asked, answers: Sequence[Answer], head: Head) -> GeneratedTokens:
    """The whole answer."""
    choices = [_choice(asked, *each) for each in enumerate(answers)]
    return GeneratedTokens(choices, asked.request_id or head.id, head.model)


def events(asked: Asked, answers: Sequence[Answer], head: Head) -> Iterator[bytes]:
    """The answer as the events of a stream."""
    yield token_api.event(whole(asked, answers, head))
    yield token_api.event(None)


def _choice(asked: Asked, index: int, answer: Answer) -> TokensChoice:
    tokens = answer.completion.tokens
    ids, logprobs = unpack_i32(tokens.ids), None
    if asked.sampling_params.logprobs is not None:
        pairs = zip(ids, unpack_f32(tokens.logprobs), strict=True)
        logprobs = TokenLogprobs([TokenLogprob(token, value, token=f"token_id:{token}") for token, value in pairs])
    versions = [WeightVersion(str(span.version), span.start, span.end) for span in tokens.spans]
    return TokensChoice(index, ids, logprobs, answer.completion.finish_reason, versions)
