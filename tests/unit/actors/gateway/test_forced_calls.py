"""A turn that is made to call a tool: it begins with the template's own opening of calls, which nothing is trained of."""

import json
from array import array

import pytest

from rubato.actors.envs.chat import ChatRenderer
from rubato.actors.envs.named_renderer import NamedRenderer
from rubato.actors.envs.templates import RenderError
from rubato.actors.gateway import chat_api, messages_api, responses_api
from rubato.actors.gateway.dialect import Head
from rubato.actors.gateway.renderers import opening_of
from rubato.actors.gateway.session import Refused
from tests.chat_models import CHATML, chat_model
from tests.scripted_sessions import scripted_session

HERMES = (
    "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}{% for call in m.tool_calls or [] %}"
    '<tool_call>\n{"name": {{ call.function.name | tojson }}, "arguments": {{ call.function.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
THINKS = HERMES.replace("{{ m.role }}\n", "{{ m.role }}\n{% if m.role == 'assistant' %}<think>\n\n</think>\n\n{% endif %}")
STARTS_THINKING = THINKS.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")

HEAD = Head("h1", 5, "m")
ADD, ADD_ALL = ({"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in ("add", "add_all"))
USER = {"role": "user", "content": "2 + 3?"}


def renderer_of(folder, template=HERMES, **more):
    return ChatRenderer(chat_model(folder, template=template), **more)


@pytest.mark.parametrize(
    ("names", "opening"),
    [
        (["add"], '<tool_call>\n{"name": "add", "arguments": {'),  # a token is a byte here
        (["add", "add_all", "adder"], '<tool_call>\n{"name": "add'),
        (["sub", "add"], '<tool_call>\n{"name": "'),
    ],
)
def test_an_opening_is_what_all_calls_of_the_tools_have_in_common(tmp_path, names, opening):
    renderer = renderer_of(tmp_path)

    assert renderer.decode(opening_of(renderer, names)) == opening


@pytest.mark.parametrize(("template", "before"), [(HERMES, ""), (THINKS, "<think>\n\n</think>\n\n"), (STARTS_THINKING, "\n</think>\n\n")])
def test_what_a_template_puts_before_a_call_comes_with_the_opening(tmp_path, template, before):
    renderer = renderer_of(tmp_path, template)

    assert renderer.decode(opening_of(renderer, ["sub", "add"])) == before + '<tool_call>\n{"name": "'


def test_a_renderer_of_a_family_gives_its_own_opening(tmp_path):
    marks = ("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
    renderer = NamedRenderer("qwen3", chat_model(tmp_path, special=marks, pad_token=None))

    assert renderer.decode(opening_of(renderer, ["sub", "add"])).endswith('<tool_call>\n{"name": "')


@pytest.mark.parametrize("template", [CHATML, HERMES.replace("<tool_call>", "[CALL]"), HERMES.replace('"name": ', '"tool": ')])
def test_a_template_that_writes_no_calls_or_writes_them_otherwise_has_no_opening(tmp_path, template):
    with pytest.raises(RenderError, match="writes no calls in a form that is known here"):
        opening_of(renderer_of(tmp_path, template), ["add"])


def test_a_name_spells_no_control_token(tmp_path):
    renderer = renderer_of(tmp_path)
    end = renderer._tokenizer.raw.token_to_id("<|im_end|>")

    assert end not in array("i", opening_of(renderer, ["a<|im_end|>b"]))


def session_of(tmp_path, *says, template=HERMES):
    """A session whose tokens are bytes; what the model writes behind an opening is said by the test."""
    folder = chat_model(tmp_path / "model", template=template)

    def rendered(tools):
        return ChatRenderer(folder, tools=tools)

    return scripted_session(*says, renderer=rendered)


def chat(choice, *messages, tools=(ADD, ADD_ALL)):
    body = {"messages": [USER, *messages], "tools": tools, "tool_choice": choice}
    return chat_api.asked_in(json.dumps(body).encode())


NAMED = {"type": "function", "function": {"name": "add"}}


@pytest.mark.parametrize(("choice", "says"), [("required", '", "arguments": {"a": 2}}\n</tool_call>'), (NAMED, '"a": 2}}\n</tool_call>')])
async def test_what_was_forced_is_part_of_the_reply_and_not_of_what_is_trained(tmp_path, choice, says):
    session = session_of(tmp_path, says, "5")
    asked = chat(choice)

    (answer,) = await session.turns(asked.ask)
    message = chat_api.whole(asked, [answer], HEAD)["choices"][0]["message"]
    await session.turns(chat("auto", message, {"role": "tool", "tool_call_id": "call_0_0", "content": "5"}).ask)

    assert message["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a": 2}'}
    (transcript,) = session.recorder.transcripts
    segment, decode = transcript.segment(), session.recorder._context.renderer.decode
    sampled = [token for token, was in zip(array("i", segment.tokens), segment.mask, strict=True) if was]
    assert sum(segment.mask) == sum(answer.num_sampled for answer in (answer,)) + 2
    assert decode(array("i", sampled[: answer.num_sampled]).tobytes()) == says
    assert session.proxy.asked[0].prompt == answer.prompt
    assert session.proxy.asked[1].prompt.startswith(answer.prompt)
    assert decode(answer.prompt).endswith('<tool_call>\n{"name": "add' + ("" if choice == "required" else '", "arguments": {'))
    assert session.forest.turns[0].text.startswith('<tool_call>\n{"name": "add", "arguments": {"a": 2}}')


async def test_where_no_call_comes_of_it_the_turn_is_text(tmp_path):
    session = session_of(tmp_path, "ition, I suppose")

    (answer,) = await session.turns(chat("required").ask)

    assert (answer.said.calls, answer.finish_reason) == ((), "stop")
    assert answer.said.content == '<tool_call>\n{"name": "addition, I suppose'


async def test_a_text_that_ends_a_turn_is_not_looked_for_in_what_was_forced(tmp_path):
    session = session_of(tmp_path, '", "arguments": {}}\n</tool_call>')
    asked = chat("required")
    asked.stop = ["name"]

    (answer,) = await session.turns(asked.ask)

    assert answer.said.calls[0].name == "add"


async def test_a_turn_that_fails_leaves_nothing_of_what_was_forced(tmp_path):
    session = session_of(tmp_path, "5", RuntimeError("no engine"), "6")
    (first,) = await session.turns(chat("auto").ask)
    history = [first.said.message, USER]

    with pytest.raises(RuntimeError):
        await session.turns(chat("required", *history).ask)
    await session.turns(chat("auto", *history).ask)

    (transcript,) = session.recorder.transcripts
    assert "<tool_call>" not in session.recorder._context.renderer.decode(transcript.prompt).rpartition("}")[2]


async def test_several_answers_may_all_be_calls(tmp_path):
    session = session_of(tmp_path, *(f'", "arguments": {{"a": {a}}}}}\n</tool_call>' for a in (1, 2)))
    asked = chat("required")
    asked.n = 2

    answers = await session.turns(asked.ask)

    assert [answer.said.calls[0].arguments for answer in answers] == ['{"a": 1}', '{"a": 2}']


async def test_a_model_whose_calls_are_not_known_is_refused_by_the_name_of_the_field(tmp_path):
    session = session_of(tmp_path, "5", template=CHATML.replace("{% for m", "{{ tools and '' }}{% for m", 1))

    with pytest.raises(Refused, match="tool_choice: a call can't be forced here") as refused:
        await session.turns(chat("required").ask)

    assert (refused.value.status, refused.value.code) == (400, "invalid_request_error")
    assert session.recorder.transcripts == []


FUNCTION = {"type": "function", "name": "add", "parameters": {"type": "object"}}
USABLE = {"name": "add", "input_schema": {"type": "object"}}


@pytest.mark.parametrize(
    ("api", "body", "forced"),
    [
        (responses_api, {"input": "2 + 3?", "tools": [FUNCTION], "tool_choice": "required"}, ("add",)),
        (responses_api, {"input": "2 + 3?", "tools": [FUNCTION], "tool_choice": {"type": "function", "name": "add"}}, ("add",)),
        (responses_api, {"input": "2 + 3?", "tools": [FUNCTION], "tool_choice": "auto"}, ()),
        (messages_api, {"messages": [USER], "tools": [USABLE], "tool_choice": {"type": "any"}}, ("add",)),
        (messages_api, {"messages": [USER], "tools": [USABLE], "tool_choice": {"type": "tool", "name": "add"}}, ("add",)),
        (messages_api, {"messages": [USER], "tools": [USABLE], "tool_choice": {"type": "none"}}, ()),
    ],
)
def test_each_dialect_has_its_own_words_for_it(api, body, forced):
    assert api.asked_in(json.dumps(body).encode()).ask.forced == forced


@pytest.mark.parametrize("choice", [{"type": "function"}, {"type": "function", "function": None}, {"type": "function", "function": {}}])
def test_a_choice_without_a_name_is_refused_and_not_passed_over(choice):
    with pytest.raises(Refused, match="tool_choice: only auto, none, required and one function by its name can be had"):
        _ = chat(choice).ask


def test_a_name_may_stand_where_responses_have_it():
    assert chat({"type": "function", "name": "add"}).ask.forced == ("add",)


@pytest.mark.parametrize("choice", ["required", NAMED])
def test_without_tools_nothing_can_be_forced(choice):
    with pytest.raises(Refused, match="tool_choice"):
        _ = chat(choice, tools=()).ask
