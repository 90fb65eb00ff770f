"""OpenAI's responses, as codex and openai-agents send and read them."""

import json

import pytest

from rubato.actors.gateway import responses_api
from rubato.actors.gateway.dialect import Head
from rubato.actors.gateway.session import Refused
from tests.scripted_sessions import scripted_session

HEAD = Head("h1", 5, "m")
ADD = {"type": "function", "name": "add", "description": "Add", "strict": True, "parameters": {"type": "object"}}
SPAWN = {"type": "namespace", "name": "agents", "description": "…", "tools": [{**ADD, "name": "spawn"}]}
CALLING = '<think>\nadd them\n</think>\n\nI add.\n<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call>'


def asked(*items, **body):
    told = {"model": "m", "input": [*items] or "2 + 3?", **body}
    return responses_api.asked_in(json.dumps(told).encode())


def events_in(told):
    events = [json.loads(event.decode().strip().split("\n")[1].removeprefix("data: ")) for event in told]
    assert [event["sequence_number"] for event in events] == [
        *range(events[0]["sequence_number"], events[0]["sequence_number"] + len(events))
    ]
    return events


def test_a_text_is_what_the_user_says():
    assert asked().ask.messages == [{"role": "user", "content": "2 + 3?"}]


def test_items_become_messages_and_what_one_turn_wrote_is_one():
    ask = asked(
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "be brief"}]},
        {"role": "user", "content": "2 + 3?"},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "role": "assistant", "id": "msg_1", "content": [{"type": "output_text", "text": "I add.", "annotations": []}]},
        {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "add", "arguments": '{"a": 2}'},
        {"type": "function_call", "id": "fc_2", "call_id": "c2", "name": "add", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "5"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "0"}]},
        {"type": "reasoning", "id": "rs_2", "summary": [], "encrypted_content": "of another model"},
        instructions="you add",
    ).ask

    assert ask.messages == [
        {"role": "system", "content": "you add\n\nbe brief"},
        {"role": "user", "content": "2 + 3?"},
        {
            "role": "assistant",
            "content": "I add.",
            "reasoning_content": "hm",
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}},
                {"id": "c2", "type": "function", "function": {"name": "add", "arguments": "{}"}},
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "5"},
        {"role": "tool", "tool_call_id": "c2", "content": "0"},
    ]


def test_functions_are_shown_hosted_tools_that_nobody_relies_on_are_not_and_others_are_refused():
    assert [tool["function"]["name"] for tool in asked(tools=[ADD, SPAWN, {"type": "web_search"}]).ask.tools] == ["add", "spawn"]
    with pytest.raises(Refused, match=r"tools\[0\]: a tool of type file_search"):
        _ = asked(tools=[{"type": "file_search"}]).ask


async def test_a_call_of_a_namespace_is_answered_with_it():
    given = asked(tools=[SPAWN])

    told = responses_api.whole(given, await scripted_session(CALLING.replace("add", "spawn")).turns(given.ask), HEAD)

    assert (told["output"][-1]["name"], told["output"][-1]["namespace"]) == ("spawn", "agents")


@pytest.mark.parametrize("keeps_reasoning", [True, False])
async def test_a_tool_loop_goes_on_with_the_tokens_that_were_sampled(keeps_reasoning):
    session = scripted_session(CALLING, "five")
    first = asked(tools=[ADD], instructions="be brief")
    told = responses_api.whole(first, await session.turns(first.ask), HEAD)
    items = [item for item in told["output"] if keeps_reasoning or item["type"] != "reasoning"]
    output = {"type": "function_call_output", "call_id": items[-1]["call_id"], "output": "5"}

    second = asked({"role": "user", "content": "2 + 3?"}, *items, output, tools=[ADD], instructions="be brief")
    last = responses_api.whole(second, await session.turns(second.ask), HEAD)

    assert [item["type"] for item in told["output"]] == ["reasoning", "message", "function_call"]
    assert last["output"][0]["content"][0]["text"] == "five"
    assert session.forest.turns[1].before is session.forest.turns[0]
    assert session.forest.turns[1].transcript is session.forest.turns[0].transcript


async def test_a_stream_has_each_item_begun_filled_and_ended_and_the_whole_at_its_end():
    given = asked(tools=[ADD], stream=True)
    answers = await scripted_session(CALLING).turns(given.ask)

    events = events_in(responses_api.events(given, answers, HEAD))

    def item(*within):
        return ["output_item.added", *within, "output_item.done"]

    def part(kind):
        return ["content_part.added", f"{kind}.delta", f"{kind}.done", "content_part.done"]

    assert [event["type"].removeprefix("response.") for event in events] == [
        "created",
        "in_progress",
        *item(*part("reasoning_text")),
        *item(*part("output_text")),
        *item("function_call_arguments.delta", "function_call_arguments.done"),
        "completed",
    ]
    assert events[-1]["response"] == responses_api.whole(given, answers, HEAD)
    assert events[-1]["response"]["usage"]["total_tokens"] == answers[0].num_prompt + answers[0].num_sampled
    assert [event["item"] for event in events if event["type"] == "response.output_item.done"] == events[-1]["response"]["output"]


@pytest.mark.parametrize("num_waited", [0, 1, 2, 5])
async def test_signs_of_life_are_the_first_events(num_waited):
    given = asked(stream=True)
    waited = [responses_api.waiting(given, HEAD._replace(num_waited=num)) for num in range(num_waited)]
    answers = await scripted_session("five").turns(given.ask)

    events = events_in([*waited, *responses_api.events(given, answers, HEAD._replace(num_waited=num_waited))])

    kinds = [event["type"] for event in events]
    assert kinds[0] == "response.created"
    assert kinds.count("response.created") == 1
    assert kinds.count("response.in_progress") == max(1, num_waited - 1)


async def test_a_turn_that_was_cut_is_incomplete():
    given = asked(max_output_tokens=2)

    answers = await scripted_session("five").turns(given.ask)
    told = responses_api.whole(given, answers, HEAD)

    assert (told["status"], told["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert events_in(responses_api.events(given, answers, HEAD))[-1]["type"] == "response.incomplete"


def test_a_stream_that_brings_no_answer_fails_with_the_sentence():
    events = events_in(responses_api.failed(asked(), Refused(503, "generation_failed", "no engine"), HEAD))

    assert [event["type"] for event in events] == ["response.created", "response.in_progress", "response.failed"]
    assert events[-1]["response"]["error"] == {"code": "generation_failed", "message": "no engine"}
