"""What a sampled turn says, by the form of calls that most open models are trained on."""

import json

import pytest

from rubato.actors.envs.calls import MOST_CALLS, said_in

ADD = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": {"c": 3}}}\n</tool_call>'


def test_a_call_has_its_name_its_arguments_and_an_id_of_its_own():
    said = said_in(f"I add.\n{ADD}\n{ADD}", 3)

    assert said.content == "I add."
    assert [(call.id, call.name, json.loads(call.arguments)) for call in said.calls] == [
        ("call_3_0", "add", {"a": 2, "b": {"c": 3}}),
        ("call_3_1", "add", {"a": 2, "b": {"c": 3}}),
    ]
    assert said.message["tool_calls"][0]["function"]["name"] == "add"
    assert said_in(ADD, 0).message["content"] is None


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>{no json}</tool_call>",
        '<tool_call>{"arguments": {}}</tool_call>',
        '<tool_call>{"name": 3, "arguments": {}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"a": 1e999}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {}}',
        "<tool_call>" + '{"a":' * 2000 + "}" * 2000 + "</tool_call>",
    ],
)
def test_what_is_no_call_stays_text_for_the_agent_to_see(text):
    said = said_in(text, 0)

    assert (said.content, said.calls) == (text, ())
    assert said.malformed == (text.removeprefix("<tool_call>").removesuffix("</tool_call>"),)
    assert said_in(f"{ADD}\n{text}").malformed == said.malformed


def test_without_tools_nothing_is_taken_for_a_call():
    assert said_in(ADD, 0, most_calls=0) == (ADD, "", (), ())


@pytest.mark.parametrize("opening", ["<think>\n", ""])  # a template may have written it already
def test_reasoning_is_told_apart(opening):
    said = said_in(f"{opening}hm\n</think>\n\nfive", 0, most_calls=0)

    assert (said.reasoning, said.content) == ("hm", "five")
    assert said.message["reasoning_content"] == "hm"


def test_calls_of_one_turn_are_bounded():
    said = said_in(ADD * (MOST_CALLS + 2), 0)

    assert len(said.calls) == MOST_CALLS
    assert said.content.count("<tool_call>") == 2
