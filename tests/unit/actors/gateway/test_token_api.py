"""Bodies of /inference/v1/generate, as both ends read and write them."""

import msgspec
import pytest

from rubato.actors.gateway import token_api
from rubato.actors.gateway.token_api import (
    GeneratedTokens,
    GenerateTokens,
    SamplingParams,
    TokenLogprob,
    TokenLogprobs,
    TokensChoice,
    TokensRefused,
    WeightVersion,
)

ASKED = GenerateTokens([5, 6], SamplingParams(9, 0.5, seed=3, logprobs=0, stop_token_ids=[1]), "a", cache_salt="7", stream=True)
LOGPROBS = TokenLogprobs([TokenLogprob(8, -0.25), TokenLogprob(9, -1.5, 2)])
ANSWERED = GeneratedTokens([TokensChoice(0, [8, 9], LOGPROBS, "length", [WeightVersion("3", 0, 2)])], "a")


async def in_pieces(content: bytes, size: int):
    for at in range(0, len(content), size):
        yield content[at : at + size]


async def all_of(content: bytes, size: int = 7):
    return [event async for event in token_api.events(in_pieces(content, size))]


def test_what_one_end_writes_the_other_reads():
    assert token_api.asked(token_api.body_of(ASKED)) == ASKED
    assert token_api.answered(token_api.body_of(ANSWERED)) == ANSWERED


def test_an_answer_as_vllm_writes_it_is_read():
    body = (
        b'{"request_id":"x","model":"/m","created":1,"usage":{"total_tokens":5},"choices":[{"index":0,"finish_reason":"stop","stop_reason":null,'
        b'"token_ids":[8,9],"routed_experts":null,"weight_versions":[{"version":"3","start":0,"end":2}],"logprobs":{"content":['
        b'{"token_id":8,"logprob":-0.25,"rank":null,"top_logprobs":[]},{"token_id":9,"logprob":-1.5,"rank":2,"top_logprobs":[]}]}}],'
        b'"output_mode":"tokens"}'
    )

    (choice,) = token_api.answered(body).choices

    assert (choice.token_ids, choice.logprobs, choice.weight_versions) == ([8, 9], LOGPROBS, [WeightVersion("3", 0, 2)])


@pytest.mark.parametrize("size", [1, 7, 10_000])
async def test_events_are_whole_however_they_are_cut(size):
    content = b": a comment\n\n" + token_api.event(ANSWERED) + b"\r\n" + token_api.event(ANSWERED) + token_api.event(None)

    assert await all_of(content, size) == [ANSWERED, ANSWERED]


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b'data: {"error": {"message": "it is full", "code": 503}}\n\n', "it is full"),
        (b'data: {"error": "Unauthorized"}\n\n', "Unauthorized"),
        (b"data: {\n\n", "is none of /inference/v1/generate"),
        (b'data: {"choices": [{"index": 0, "token_ids": [-1]}]}\n\n', "is none of /inference/v1/generate"),
        (token_api.event(ANSWERED), "broke off"),
        (b"", "broke off"),
    ],
)
async def test_what_is_no_answer_is_refused_with_what_was_said(content, sentence):
    with pytest.raises(TokensRefused, match=sentence):
        await all_of(content)


async def test_an_event_without_an_end_is_cut_short(monkeypatch):
    monkeypatch.setattr(token_api, "MOST_BYTES", 100)

    with pytest.raises(TokensRefused, match="more than 100 bytes"):
        await all_of(b"data: " + b"x" * 1000)


@pytest.mark.parametrize(
    "body",
    [
        b"{}",
        b'{"token_ids": [], "sampling_params": {"max_tokens": 1}}',
        b'{"token_ids": [1], "sampling_params": {"max_tokens": 0}}',
        b'{"token_ids": [1], "sampling_params": {"max_tokens": 1, "temperature": -1}}',
        b'{"token_ids": [4294967296], "sampling_params": {"max_tokens": 1}}',
    ],
)
def test_a_request_that_asks_for_nothing_that_can_be_is_refused(body):
    with pytest.raises(msgspec.ValidationError):
        token_api.asked(body)
