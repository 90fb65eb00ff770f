"""vLLM's generate, answered by a session and asked by the client that engines have."""

import asyncio
import json
import socket
from array import array
from contextlib import asynccontextmanager

import pytest
import uvicorn

from rubato.actors.engines.vllm_http import VllmClient
from rubato.actors.gateway import generate_api, token_api
from rubato.actors.gateway.dialect import Head
from rubato.actors.gateway.token_api import GenerateTokens, SamplingParams, TokensRefused, WeightVersion
from rubato.runtime.http_server import HttpServer
from tests.scripted_sessions import END, VERSION, app_of, ids, refused_by_engine, scripted_session

PROMPT = [*map(ord, "2 + 3?")]


@asynccontextmanager
async def client_of(session):
    """Our client of a vLLM, at a gateway that has the session."""
    listener = socket.create_server(("127.0.0.1", 0))
    server = HttpServer(uvicorn.Config(app_of(session), log_config=None, lifespan="off"))
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(server.serve([listener]))
        client = VllmClient(f"http://127.0.0.1:{listener.getsockname()[1]}", "")
        try:
            yield client
        finally:
            await client.close()
            server.end()
            server.end()
            await running


async def all_of(client, asked):
    choices = [choice async for event in client.generate(asked) for choice in event.choices]
    assert {choice.index for choice in choices} == {0}
    return choices


async def test_our_client_of_a_vllm_is_answered_and_a_prompt_goes_on_with_the_tokens_that_were_kept():
    session = scripted_session("five", "sure")
    async with client_of(session) as client:
        asked = GenerateTokens(PROMPT, SamplingParams(99, logprobs=0, detokenize=False), "r1", stream=True)
        (first,) = await all_of(client, asked)
        more = [*PROMPT, *first.token_ids, *map(ord, "sure?")]
        (second,) = await all_of(client, GenerateTokens(more, SamplingParams(2), stream=True))

    assert first.token_ids == [*map(ord, "five"), END]
    assert [(one.token_id, one.logprob) for one in first.logprobs.content] == [(token, -0.5) for token in first.token_ids]
    assert (first.finish_reason, first.weight_versions) == ("stop", [WeightVersion(str(VERSION), 0, 5)])
    assert (second.token_ids, second.logprobs, second.finish_reason) == ([*map(ord, "su")], None, "length")
    one, other = session.forest.turns
    assert other.before is one
    assert other.transcript is one.transcript
    assert sum(other.transcript.segment().mask) == 7


async def test_our_client_hears_why_it_is_refused():
    async with client_of(scripted_session(refused_by_engine(), max_len=100)) as client:
        with pytest.raises(TokensRefused, match="it can't be"):
            await all_of(client, GenerateTokens(PROMPT, SamplingParams(9), stream=True))
        with pytest.raises(TokensRefused, match=r"rollout\.max_len"):
            await all_of(client, GenerateTokens([5] * 200, SamplingParams(9), stream=True))


def asked(**body):
    return generate_api.asked_in(json.dumps({"token_ids": PROMPT, "sampling_params": {}, **body}).encode())


async def test_it_is_answered_whole_too():
    given = asked(sampling_params={"n": 2, "logprobs": 1}, request_id="mine")
    session = scripted_session("5", "five")

    told = token_api.answered(token_api.body_of(generate_api.whole(given, await session.turns(given.ask), Head("h", 5, "m"))))

    assert (told.request_id, told.model) == ("mine", "m")
    assert [bytes(array("i", choice.token_ids)) for choice in told.choices] == [ids(f"5{chr(END)}"), ids(f"five{chr(END)}")]


async def test_what_ends_a_turn_is_the_templates_and_the_clients_or_the_clients_alone():
    session = scripted_session("5")
    for params in ({"stop_token_ids": [9]}, {"stop_token_ids": [9], "ignore_eos": True}, {"stop": "X"}):
        await session.turns(asked(sampling_params=params).ask)

    assert [request.sampling.stop_token_ids for request in session.proxy.asked] == [(END, 9), (9,), (END,)]
    assert session.proxy.asked[2].sampling.stop == ("X",)


async def test_a_turn_that_was_cut_is_gone_on_with_where_it_ended():
    session = scripted_session("five")
    (cut,) = await session.turns(asked(sampling_params={"max_tokens": 2}).ask)

    (rest,) = await session.turns(asked(token_ids=[*PROMPT, *map(ord, "fi")]).ask)

    assert cut.completion.finish_reason == "length"
    assert session.forest.turns[1].before is session.forest.turns[0]
    assert rest.num_prompt == len(PROMPT) + 2
