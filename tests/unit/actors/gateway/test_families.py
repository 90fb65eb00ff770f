"""Turns of models whose calls have a form of their own, read by the package `renderers`."""

import json

import pytest

from rubato.actors.envs.named_renderer import NamedRenderer
from rubato.actors.gateway.renderers import opening_of, read_turn
from rubato.actors.gateway.session import Ask
from tests.chat_models import chat_model
from tests.scripted_sessions import scripted_session

QWEN3 = ("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
GLM = (
    "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>", "<|endoftext|>", "<think>", "</think>", "<tool_call>",
    "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "<tool_response>", "</tool_response>", "/nothink",
)  # fmt: skip
TOOLS = [
    {
        "type": "function",
        "function": {"name": name, "description": "", "parameters": {"type": "object", "properties": {"a": {"type": "string"}}}},
    }
    for name in ("add", "sub")
]
CALLS = {
    "qwen3": '<tool_call>\n{"name": "add", "arguments": {"a": "2"}}\n</tool_call>',
    "glm-4.5": "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>2</arg_value>\n</tool_call>",
}


@pytest.fixture(params=CALLS)
def family(request, tmp_path):
    """Its name, and its renderer."""
    special = {"qwen3": QWEN3, "glm-4.5": GLM}[request.param]
    folder = chat_model(tmp_path, special=special, eos_token=special[2] if request.param == "qwen3" else "<|endoftext|>", pad_token=None)
    return request.param, NamedRenderer(request.param, folder, tools=TOOLS)


def read(renderer, text, **more):
    prompt = renderer.chat([{"role": "user", "content": "2 + 3?"}])
    turn = renderer._tokenizer.encode(text).tobytes()
    return read_turn(renderer, prompt, turn, renderer.decode(turn), 3, **more)


def test_a_familys_calls_and_reasoning_are_told_apart(family):
    name, renderer = family

    said = read(renderer, f"<think>hm</think>\n\nI add.\n{CALLS[name]}")

    assert (said.reasoning, said.content.strip(), said.malformed) == ("hm", "I add.", ())
    assert [(call.id, call.name, json.loads(call.arguments)) for call in said.calls] == [("call_3_0", "add", {"a": "2"})]


def test_calls_beyond_the_number_that_is_wanted_stay_text(family):
    name, renderer = family

    one, none = (read(renderer, CALLS[name] * 2, most_calls=most) for most in (1, 0))

    assert (len(one.calls), one.content.count("add")) == (1, 1)
    assert (len(none.calls), none.content.count("add")) == (0, 2)


def test_a_call_that_is_none_is_seen(family):
    name, renderer = family

    said = read(renderer, CALLS[name].replace("</tool_call>", "").replace("</arg_value>", ""))

    assert said.calls == ()
    assert len(said.malformed) == 1
    assert "add" in said.content


def test_a_forced_call_begins_as_the_family_has_it(family):
    name, renderer = family

    opening = renderer.decode(opening_of(renderer, ["add", "sub"]))

    assert opening.endswith({"qwen3": '<tool_call>\n{"name": "', "glm-4.5": "<tool_call>"}[name])
    assert "add" in renderer.decode(opening_of(renderer, ["add"]))


def test_a_turn_without_text_is_shown_without_any(family):
    _, renderer = family
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": "2"}'}}
    history = [{"role": "user", "content": "2 + 3?"}, {"role": "assistant", "content": None, "tool_calls": [call]}]

    shown = renderer.decode(renderer.chat([*history, {"role": "tool", "tool_call_id": "c1", "content": "5"}]))

    assert "None" not in shown
    assert "add" in shown


async def test_a_forced_call_is_gone_on_from_by_the_tokens_that_were_kept(family):
    name, renderer = family
    says = {"qwen3": 'add", "arguments": {"a": "2"}}\n</tool_call>', "glm-4.5": CALLS["glm-4.5"].removeprefix("<tool_call>")}[name]
    session = scripted_session(says, "<think>hm</think>5", renderer=lambda tools: renderer)
    session.proxy.end = renderer._tokenizer.raw.token_to_id({"qwen3": "<|im_end|>", "glm-4.5": "<|observation|>"}[name])
    asked = Ask([{"role": "user", "content": "2 + 3?"}], tools=TOOLS, forced=("add", "sub"))

    (first,) = await session.turns(asked)
    result = {"role": "tool", "tool_call_id": first.said.calls[0].id, "content": "5"}
    (second,) = await session.turns(asked._replace(messages=[*asked.messages, first.said.message, result], forced=()))

    assert [(call.name, json.loads(call.arguments)) for call in first.said.calls] == [("add", {"a": "2"})]
    assert second.said.content.strip() == "5"
    assert second.prompt.startswith(first.prompt + first.completion.tokens.ids)
    between = renderer.decode(second.prompt.removeprefix(first.prompt + first.completion.tokens.ids))
    assert "5" in between
    assert "tool_call" not in between
    assert len(session.recorder.transcripts) == 1
