"""Chat completions: several answers, tools that are not to be called, log-probabilities, streams."""

import json

import pytest

from rubato.actors.gateway import chat_api
from rubato.actors.gateway.dialect import Head
from rubato.actors.gateway.session import Refused
from rubato.bus.message import unpack_i32
from tests.scripted_sessions import scripted_session

HEAD = Head("h1", 5, "m")
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}, "strict": True}}
CALL = '<tool_call>{"name": "add", "arguments": {"a": 2}}</tool_call>'


def asked(**body):
    return chat_api.asked_in(json.dumps({"messages": [{"role": "user", "content": "2 + 3?"}], **body}).encode())


def chunks_of(events):
    *told, last = [event.removeprefix(b"data: ").strip() for event in events]
    assert last == b"[DONE]"
    return [json.loads(each) for each in told]


async def test_several_answers_are_choices_and_their_tokens_are_all_counted():
    session = scripted_session("five", "5", "3")
    many = asked(n=3, return_token_ids=True, logprobs=True)

    answers = await session.turns(many.ask)
    told, chunks = chat_api.whole(many, answers, HEAD), chunks_of(chat_api.events(asked(n=3), answers, HEAD))

    assert [choice["message"]["content"] for choice in told["choices"]] == ["five", "5", "3"]
    assert [choice["index"] for choice in told["choices"]] == [0, 1, 2]
    assert told["usage"]["completion_tokens"] == 5 + 2 + 2
    assert told["prompt_token_ids"]
    assert [[entry["logprob"] for entry in choice["logprobs"]["content"]] for choice in told["choices"]] == [
        [-0.5] * 5,
        [-0.5] * 2,
        [-0.5] * 2,
    ]
    said = dict.fromkeys(range(3), "")
    for chunk in chunks:
        for choice in chunk["choices"]:
            said[choice["index"]] += choice["delta"].get("content") or ""
    assert said == {0: "five", 1: "5", 2: "3"}


@pytest.mark.parametrize(("choice", "num"), [("none", 0), ("auto", 2)])
async def test_tools_that_are_not_to_be_called_are_shown_and_calls_stay_text(choice, num):
    session = scripted_session(CALL * 2)
    given = asked(tools=[ADD], tool_choice=choice)

    (answer,) = await session.turns(given.ask)

    assert given.ask.tools == (ADD,)
    assert len(answer.said.calls) == num
    assert answer.finish_reason == ("tool_calls" if num else "stop")
    assert (CALL in answer.said.content) == (not num)


async def test_without_parallel_calls_the_first_is_one_and_the_second_stays_text():
    (answer,) = await scripted_session(CALL * 2).turns(asked(tools=[ADD], parallel_tool_calls=False).ask)

    assert (len(answer.said.calls), answer.said.content) == (1, CALL)


async def test_what_the_model_reasoned_and_called_is_told_apart_in_a_stream():
    given = asked(tools=[ADD], stream=True, stream_options={"include_usage": True})
    answers = await scripted_session(f"<think>hm</think>I add.{CALL}").turns(given.ask)

    *chunks, usage = chunks_of(chat_api.events(given, answers, HEAD))

    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[1:3] == [{"reasoning_content": "hm"}, {"content": "I add."}]
    assert deltas[3]["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a": 2}'}
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"
    assert usage["usage"]["total_tokens"] == answers[0].num_prompt + answers[0].num_sampled


async def test_the_first_event_of_a_stream_has_the_ids_of_its_prompt():
    given = asked(n=2, stream=True, return_token_ids=True)
    answers = await scripted_session("five", "5").turns(given.ask)

    first, *others = chunks_of(chat_api.events(given, answers, HEAD))

    assert first["prompt_token_ids"] == [*unpack_i32(answers[0].prompt)]
    assert not any("prompt_token_ids" in chunk for chunk in others)


async def test_a_stop_of_the_client_is_not_told_and_its_tokens_are_kept():
    session = scripted_session("5 Observation: it is five")

    (answer,) = await session.turns(asked(stop=["Observation:"]).ask)

    assert (answer.said.content, answer.stop) == ("5 ", "Observation:")
    assert session.proxy.asked[0].sampling.stop == ("Observation:",)
    assert answer.num_sampled > len("5 Observation:")


def test_a_developer_is_the_system_and_parts_are_one_text():
    given = asked(messages=[{"role": "developer", "content": [{"type": "text", "text": "be "}, {"type": "text", "text": "brief"}]}])

    assert [*given.ask.messages] == [{"role": "system", "content": "be brief"}]


@pytest.mark.parametrize(
    "more",
    [
        {"structured_outputs": {"json": {}}},
        {"guided_json": {"type": "object"}},
        {"bad_words": ["no"]},
        {"ignore_eos": True},
        {"min_tokens": 3},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"continue_final_message": True},
        {"add_generation_prompt": False},
        {"modalities": ["text", "audio"]},
        {"web_search_options": {"user_location": None}},
        {"function_call": {"name": "add"}},
        {"allowed_token_ids": [5, 6]},
        {"prompt_logprobs": 1},
        {"truncate_prompt_tokens": 8},
        {"documents": [{"text": "five"}]},
        {"echo": True},
    ],
)
def test_what_would_change_the_answer_and_can_not_be_had_is_named(more):
    with pytest.raises(Refused, match=next(iter(more))) as refused:
        _ = asked(**more).ask

    assert refused.value.status == 400


def test_what_changes_nothing_is_taken():
    given = asked(structured_outputs=None, guided_json=None, bad_words=[], min_tokens=0, modalities=["text"], function_call="auto")

    assert given.ask.n == 1
    assert asked(add_generation_prompt=True, continue_final_message=False, chat_template_kwargs={}).ask.n == 1


async def test_token_ids_that_a_client_names_end_a_turn_too():
    session = scripted_session("five")

    await session.turns(asked(stop_token_ids=[7, 8]).ask)

    assert session.proxy.asked[0].sampling.stop_token_ids[-2:] == (7, 8)


@pytest.mark.parametrize(
    ("written", "text"),
    [
        (r"\ud800x", "\ufffdx"),
        (r"x\udc00", "x\ufffd"),
        (r"\ud83d\ude00", "\U0001f600"),
        (r"\ud83d\ud83d\ude00", "\ufffd\U0001f600"),
        (r"\uD83D", "\ufffd"),
        (r"\\ud800", "\\ud800"),
        (r"\\\ud800\"", '\\\ufffd"'),
    ],
)
def test_half_a_character_is_replaced_as_in_texts_of_environments(written, text):
    body = b'{"messages": [{"role": "user", "content": "' + written.encode() + b'"}]}'

    assert chat_api.asked_in(body).ask.messages[0]["content"] == text
