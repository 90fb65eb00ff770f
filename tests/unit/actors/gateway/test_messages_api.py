"""Anthropic's messages, as its SDK sends and reads them."""

import json

import pytest

from rubato.actors.gateway import messages_api
from rubato.actors.gateway.dialect import Head
from rubato.actors.gateway.session import Refused, SessionOver
from tests.scripted_sessions import scripted_session

HEAD = Head("h1", 5, "m")
ADD = {"name": "add", "description": "Add", "input_schema": {"type": "object", "properties": {"a": {"type": "integer"}}}}
CALLING = '<think>\nadd them\n</think>\n\nI add.\n<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3.0}}\n</tool_call>'


def asked(*messages, **body):
    told = {"model": "m", "max_tokens": 1000, "messages": [*(messages or [{"role": "user", "content": "2 + 3?"}])], **body}
    return messages_api.asked_in(json.dumps(told).encode())


def events_in(told):
    found = []
    for event in told:
        name, data = event.decode().strip().split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert found[-1]["type"] == name.removeprefix("event: ")
    return found


def test_a_body_becomes_a_chat_with_results_of_tools_as_messages_of_their_own():
    ask = asked(
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "redacted_thinking", "data": "x"},
                {"type": "thinking", "thinking": "hm", "signature": "s"},
                {"type": "text", "text": "I add."},
                {"type": "tool_use", "id": "c1", "name": "add", "input": {"a": 2}},
            ],
        },
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "5"}, {"type": "text", "text": "go on"}]},
        system=[{"type": "text", "text": "be brief"}, {"type": "text", "text": "be kind"}],
        tools=[ADD],
        stop_sequences=["X"],
    ).ask

    assert ask.messages == [
        {"role": "system", "content": "be brief\n\nbe kind"},
        {"role": "user", "content": "a\n\nb"},
        {
            "role": "assistant",
            "content": "I add.",
            "reasoning_content": "hm",
            "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": 2}}}],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "5"},
        {"role": "user", "content": "go on"},
    ]
    assert ask.tools == ({"type": "function", "function": {"name": "add", "description": "Add", "parameters": ADD["input_schema"]}},)
    assert (ask.max_tokens, ask.stop) == (1000, ("X",))


@pytest.mark.parametrize("keeps_thinking", [True, False])
async def test_a_tool_loop_goes_on_with_the_tokens_that_were_sampled(keeps_thinking):
    session = scripted_session(CALLING, "five")
    first = asked(tools=[ADD])
    told = messages_api.whole(first, await session.turns(first.ask), HEAD)
    content = [block for block in told["content"] if keeps_thinking or block["type"] != "thinking"]
    content[-1] |= {"input": {"b": 3, "a": 2}}  # as JavaScript has it
    result = {"type": "tool_result", "tool_use_id": content[-1]["id"], "content": [{"type": "text", "text": "5"}]}
    history = [{"role": "user", "content": "2 + 3?"}, {"role": "assistant", "content": content}, {"role": "user", "content": [result]}]

    second = asked(*history, tools=[ADD])
    last = messages_api.whole(second, await session.turns(second.ask), HEAD)

    assert told["stop_reason"] == "tool_use"
    assert [block["type"] for block in told["content"]] == ["thinking", "text", "tool_use"]
    assert (last["stop_reason"], last["content"]) == ("end_turn", [{"type": "text", "text": "five"}])
    assert session.forest.turns[1].before is session.forest.turns[0]
    assert session.forest.turns[1].transcript is session.forest.turns[0].transcript


async def test_a_stream_has_each_block_begun_filled_and_ended():
    given = asked(tools=[ADD], stream=True)
    answers = await scripted_session(CALLING).turns(given.ask)

    events = events_in(messages_api.events(given, answers, HEAD))

    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    kinds = [event["type"] for event in events]
    assert kinds == ["message_start", *block[:2], *block[1:], *block, *block, "message_delta", "message_stop"]
    deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    assert [delta["type"] for delta in deltas] == ["thinking_delta", "signature_delta", "text_delta", "input_json_delta"]
    assert json.loads(deltas[-1]["partial_json"]) == {"a": 2, "b": 3.0}
    assert events[-2] == {
        "type": "message_delta",
        "delta": {"stop_reason": "tool_use", "stop_sequence": None},
        "usage": {"input_tokens": answers[0].num_prompt, "output_tokens": answers[0].num_sampled},
    }


@pytest.mark.parametrize(
    ("text", "body", "reason", "stop"),
    [
        ("five", {}, "end_turn", None),
        ("fiveX!", {"stop_sequences": ["X"]}, "stop_sequence", "X"),
        ("five", {"max_tokens": 2}, "max_tokens", None),
    ],
)
async def test_why_a_turn_ended_is_told(text, body, reason, stop):
    given = asked(**body)

    told = messages_api.whole(given, await scripted_session(text).turns(given.ask), HEAD)

    assert (told["stop_reason"], told["stop_sequence"]) == (reason, stop)


async def test_tokens_are_counted_and_nothing_is_sampled():
    session = scripted_session("five")
    given = asked(system="be brief")

    num = await session.count(given.ask)
    (answer,) = await session.turns(given.ask)

    assert messages_api.counted(num) == {"input_tokens": answer.num_prompt}
    assert len(session.forest.turns) == 1


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (Refused(400, "invalid_request_error", "no"), "invalid_request_error"),
        (Refused(401, "invalid_api_key", "no"), "authentication_error"),
        (Refused(413, "too_large", "no"), "request_too_large"),
        (Refused(429, "too_many_requests", "no"), "rate_limit_error"),
        (Refused(503, "generation_failed", "no"), "api_error"),
        (SessionOver("stale"), "session_over"),
    ],
)
def test_errors_are_told_as_anthropic_does(error, kind):
    told = messages_api.error(error)

    assert told == {"type": "error", "error": {"type": kind, "message": str(error), "code": error.code}}
    assert events_in(messages_api.failed(asked(), error, HEAD)) == [told]


def test_clients_know_by_the_words_that_a_conversation_is_too_long():
    told = messages_api.error(Refused(400, "context_length_exceeded", "it has 9 tokens"))

    assert told["error"]["message"].startswith("prompt is too long")


def test_a_sign_of_life_is_a_ping():
    assert events_in([messages_api.waiting(asked(), HEAD)]) == [{"type": "ping"}]
