"""What all dialects promise: a body that can't be answered is refused with a status and a sentence that names the field, never an error."""

import asyncio
import json
from copy import deepcopy

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from starlette.requests import Request

from rubato.actors.gateway.answering import DIALECTS
from rubato.actors.gateway.gateway import Opening
from rubato.actors.gateway.server import decoded, key_of
from rubato.actors.gateway.session import Ending, Refused
from tests.scripted_sessions import app_of, scripted_session

FUNCTION = {"type": "function", "name": "add", "description": "Add", "parameters": {"type": "object", "properties": {}}, "strict": True}
CALLS = [{"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}}]
USE = {"type": "tool_use", "id": "c1", "name": "add", "input": {"a": 2}}

CHAT = {
    "model": "m",
    "messages": [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "2 + 3?"}]},
        {"role": "assistant", "content": None, "tool_calls": CALLS, "reasoning_content": "hm"},
        {"role": "tool", "tool_call_id": "c1", "content": "5"},
    ],
    "tools": [{"type": "function", "function": {key: value for key, value in FUNCTION.items() if key != "type"}}],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "max_completion_tokens": 9,
    "stop": ["X"],
    "n": 1,
    "stream_options": {"include_usage": True},
    "logprobs": True,
    "top_logprobs": 0,
}
MESSAGES = {
    "model": "m",
    "max_tokens": 9,
    "system": [{"type": "text", "text": "be brief", "cache_control": {"type": "ephemeral"}}],
    "messages": [
        {"role": "user", "content": "2 + 3?"},
        {
            "role": "assistant",
            "content": [{"type": "thinking", "thinking": "hm", "signature": "s"}, {"type": "text", "text": "I add."}, USE],
        },
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "5"}]}]},
    ],
    "tools": [{"name": "add", "description": "Add", "input_schema": {"type": "object"}}],
    "tool_choice": {"type": "auto"},
    "stop_sequences": ["X"],
    "thinking": {"type": "enabled", "budget_tokens": 1024},
}
RESPONSES = {
    "model": "m",
    "instructions": "be brief",
    "input": [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "and kind"}]},
        {"role": "user", "content": "2 + 3?"},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "add", "arguments": '{"a": 2}', "status": "completed"},
        {"type": "function_call_output", "call_id": "c1", "output": "5"},
    ],
    "tools": [FUNCTION, {"type": "namespace", "name": "agents", "tools": [{**FUNCTION, "name": "spawn"}]}, {"type": "web_search"}],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "max_output_tokens": 9,
    "text": {"format": {"type": "text"}},
    "store": False,
}
GENERATE = {"token_ids": [5, 6], "sampling_params": {"max_tokens": 9, "logprobs": 1, "stop_token_ids": [3], "n": 1}, "request_id": "r"}

BODIES = {
    "/v1/chat/completions": CHAT,
    "/v1/messages": MESSAGES,
    "/v1/messages/count_tokens": MESSAGES,
    "/v1/responses": RESPONSES,
    "/inference/v1/generate": GENERATE,
}


def refused(path, body):
    """The refusal of a body; None where it is taken."""
    try:
        ask = DIALECTS[path].asked_in(body if isinstance(body, bytes) else json.dumps(body).encode()).ask
        _ = [*getattr(ask, "messages", ())]  # as a session reads them
    except Refused as error:
        return error
    return None


def test_every_dialect_has_a_body_here():
    assert set(BODIES) == set(DIALECTS)


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_body_as_clients_send_it_is_answered(path, stream):
    session = scripted_session('<think>hm</think>I add.<tool_call>{"name": "add", "arguments": {"a": 2}}</tool_call>')
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app_of(session)), base_url="http://gateway") as client:
        told = await client.post(path, json=BODIES[path] | {"stream": stream, "unknown": {"to": "all"}})

    assert told.status_code == 200, told.text
    assert told.headers["content-type"].startswith("text/event-stream") == (stream and not path.endswith("count_tokens"))


CASES = {
    "/v1/chat/completions": {
        "messages": [None, [], "hi", [{}], [{"role": "x", "content": "y"}], [{"role": "user", "content": 3}]],
        "max_tokens": [0, -1, "9", 2**31],
        "max_completion_tokens": [0],
        "stop": ["", [""], [3], 3, ["x"] * 17, "x" * 2000],
        "tools": [{}, [{}], [{"type": "custom"}], [{"type": "function", "function": {"name": ""}}], [{"type": "function", "function": 3}]],
        "tool_choice": [{"type": "function", "function": {"name": "none"}}, {"type": "allowed_tools", "allowed_tools": {}}, "any", 3],
        "parallel_tool_calls": ["no"],
        "n": [0, 65, "2"],
        "stream": ["yes"],
        "stream_options": [3],
        "response_format": [{"type": "json_object"}, 3],
        "logit_bias": [{"5": 1}],
        "functions": [[{"name": "add"}]],
        "logprobs": [3],
        "top_logprobs": [5, -1],
    },
    "/v1/messages": {
        "messages": [None, [], [{"role": "user"}], [{"role": "tool", "content": "x"}], [{"content": "x"}], [MESSAGES["messages"][1]]],
        "max_tokens": [0, "9"],
        "system": [3, [3], [{"type": "image"}], [{"type": "text"}]],
        "stop_sequences": ["X", [""]],
        "tools": [{}, [{}], [{"name": "add"}], [{"type": "bash_20250124", "name": "bash"}], [{"name": "", "input_schema": {}}]],
        "tool_choice": ["auto", {"type": "tool", "name": "none"}, {"type": "tool"}, {"type": "required"}],
        "output_config": [{"format": {"type": "json_schema"}}],
        "output_format": [{"type": "json_schema"}],
        "mcp_servers": [[{"type": "url"}]],
        "container": ["x"],
        "thread": [{"type": "create"}],
        "stream": [3],
    },
    "/v1/responses": {
        "input": [None, [], 3, [3], [{}], [{"role": "user"}], [{"role": "robot", "content": "x"}], [{"type": "item_reference", "id": "x"}]],
        "instructions": [3],
        "max_output_tokens": [0],
        "tools": [[{}], [{"type": "mcp"}], [{"type": "function"}], [{"type": "namespace", "name": "x"}], [{"type": "custom", "name": "x"}]],
        "tool_choice": [{"type": "function", "name": "none"}, {"type": "web_search"}, {"type": "allowed_tools", "mode": "required"}, 3],
        "previous_response_id": ["resp_1", 3],
        "conversation": ["conv_1"],
        "prompt": [{"id": "x"}],
        "background": [True],
        "text": [3, {"format": {"type": "json_schema"}}],
        "top_logprobs": [3],
        "stream": ["yes"],
    },
    "/inference/v1/generate": {
        "token_ids": [None, [], [-1], ["a"], [2**31]],
        "sampling_params": [3, {"max_tokens": 0}, {"n": 0}, {"n": 65}, {"logprobs": 5}, {"stop": ""}, {"prompt_logprobs": 1}, {"bad_words": ["x"]}],
        "features": [{"mm": 1}],
        "stream": [3],
    },
}  # fmt: skip


@pytest.mark.parametrize(
    ("path", "field", "value"),
    [(path, field, value) for path, fields in CASES.items() for field, values in fields.items() for value in values],
)
def test_each_field_that_is_wrong_is_named(path, field, value):
    body = {**BODIES[path], field: value}

    error = refused(path, body)

    assert error is not None
    assert (error.status, error.code) == (400, "invalid_request_error")
    assert field in str(error)


@pytest.mark.parametrize("path", [path for path in BODIES if path != "/inference/v1/generate"])
@pytest.mark.parametrize(
    "part", [{"type": "image_url"}, {"type": "input_image"}, {"type": "image"}, {"type": "input_audio"}, {"type": "file"}]
)
def test_what_is_no_text_is_refused_by_its_name(path, part):
    key = "input" if path == "/v1/responses" else "messages"

    error = refused(path, {key: [{"role": "user", "content": [{"type": "text", "text": "look"}, part]}], "max_tokens": 9})

    assert f"a part of type {part['type']}" in str(error)
    assert key in str(error)


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"null", b"\xff", b'{"messages": "\\ud800"}', b"[" * 100_000, b'{"a":' * 100_000, b'{"input": 1e999}']
)
def test_what_is_no_such_object_is_refused(path, body):
    assert refused(path, body).status == 400


@pytest.mark.parametrize("path", BODIES)
def test_bytes_that_are_no_utf_8_are_refused(path):
    assert refused(path, json.dumps(BODIES[path] | {"model": "?"}).encode().replace(b"?", b"\xff")).status == 400


@pytest.mark.parametrize("kind", [Opening, Ending])
@pytest.mark.parametrize("body", [b"{", b"[]", b'{"error": "\xff", "task": "\xff"}', b'{"metadata":' + b"[" * 100_000])
def test_a_body_that_opens_or_ends_a_session_is_refused_alike(kind, body):
    with pytest.raises(Refused, match="the body is not what is asked for here"):
        decoded(body, kind)


@pytest.mark.parametrize(
    ("path", "key"),
    [("/v1/chat/completions", "tools"), ("/v1/messages", "tools"), ("/v1/responses", "tools"), ("/v1/messages", "messages")],
)
def test_what_is_nested_too_deeply_is_refused_before_it_is_worked_on(path, key):
    body = deepcopy(BODIES[path])
    deep = json.loads('{"a":' * 500 + "1" + "}" * 500)
    tool = body["tools"][0]
    if key == "messages":
        body["messages"][1]["content"][2]["input"] = deep
    elif path == "/v1/chat/completions":
        tool["function"]["parameters"] = deep
    else:
        tool["input_schema" if path == "/v1/messages" else "parameters"] = deep

    assert key in str(refused(path, body))


ODD = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=3),
    st.lists(st.one_of(st.none(), st.integers(), st.text(max_size=3), st.just({})), max_size=2),
    st.dictionaries(st.sampled_from(["type", "role", "content", "name", "text", "x"]), st.one_of(st.none(), st.integers(), st.text(max_size=3)), max_size=3),
)  # fmt: skip


def places_in(value, at=()):
    yield at
    for key, item in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from places_in(item, (*at, key))


def mangled(body, at, odd):
    """The body with `odd` at one of its places."""
    if not at:
        return odd
    body = deepcopy(body)
    within = body
    for key in at[:-1]:
        within = within[key]
    within[at[-1]] = odd
    return body


@pytest.mark.parametrize("path", BODIES)
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_a_mangled_body_is_answered_or_refused_with_a_status(path, data):
    body = BODIES[path]
    for _ in range(data.draw(st.integers(1, 2))):
        body = mangled(body, data.draw(st.sampled_from([*places_in(body)])), data.draw(ODD))

    async def status():
        session = scripted_session('<think>hm</think><tool_call>{"name": "add", "arguments": {}}</tool_call>')
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app_of(session)), base_url="http://gateway") as client:
            told = await client.post(path, content=json.dumps(body).encode())
        return told.status_code, bool(isinstance(told.json(), dict) and (told.json().get("error") or {}).get("message"))

    assert asyncio.run(status()) in ((200, False), (400, True))


@pytest.mark.parametrize(
    ("headers", "key"),
    [
        ({"Authorization": "Bearer rbt-1"}, "rbt-1"),
        ({"authorization": "bearer rbt-1"}, "rbt-1"),
        ({"x-api-key": "rbt-1", "Authorization": "Bearer other"}, "rbt-1"),
        ({"Authorization": "rbt-1"}, "rbt-1"),
        ({}, ""),
    ],
)
def test_a_key_comes_in_either_header_and_its_scheme_in_any_case(headers, key):
    raw = [(name.lower().encode(), value.encode()) for name, value in headers.items()]

    assert key_of(Request({"type": "http", "headers": raw})) == key
