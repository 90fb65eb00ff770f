"""What the chat server makes of bad requests, of strangers, and of clients that are slow or leave, without a socket."""

import asyncio
import json
from array import array
from pathlib import Path

import pytest

from rubato.actors.envs.templates import RenderError
from rubato.actors.gateway.chat_server import TOKEN, ChatServer
from rubato.actors.gateway.server import BODY_S
from rubato.actors.messages.generation import Completion, Tokens, VersionSpan
from rubato.runtime.errors import ConfigError

CHAT = {"messages": [{"role": "user", "content": "wind 1"}], "max_tokens": 4}


class Renderer:
    """A token for each character."""

    stop_token_ids = (0,)
    stop_strings = ("Human:",)

    async def by(self, limits, tools=()):
        """It is the one for all tools."""
        return self

    def chat(self, turns):
        if turns[0]["role"] == "tool":
            raise RenderError("a chat can't begin with a tool")
        return array("i", map(ord, turns[-1]["content"])).tobytes()

    def decode(self, ids):
        return "".join(map(chr, array("i", ids)))


class Server:
    def __init__(self, context):
        self.context, self.left, self.asked = context, [], []
        self.actor = ChatServer(ChatServer.Config(), context)
        self.actor._renderers = Renderer()
        self.app = self.actor._app()
        context.actors["llm_proxy"] = self.complete

    async def complete(self, request):
        self.asked.append(request)
        return Completion(request.request_id, Tokens(array("i", [65]).tobytes(), bytes(4), (VersionSpan(0, 0, 1),)), "stop", "engine-1")

    async def hangs(self, request):
        try:
            await asyncio.sleep(1000)
        except asyncio.CancelledError:
            self.left.append(request.request_id)
            raise

    async def send(self, pieces, path="/v1/chat/completions", method="POST", token=""):
        """Status and body. `pieces` are the body's, seconds to wait before the next one, or None where the client leaves."""
        said, body, coming = [], bytearray(), iter(pieces)

        async def receive():
            for piece in coming:
                if isinstance(piece, float):
                    await asyncio.sleep(piece)
                elif piece is None:
                    return {"type": "http.disconnect"}
                else:
                    return {"type": "http.request", "body": piece, "more_body": not piece.endswith(b"}")}
            await asyncio.sleep(10_000)
            return {"type": "http.disconnect"}

        async def answered(message):
            said.append(message.get("status"))
            body.extend(message.get("body", b""))

        headers = [(b"authorization", f"Bearer {token}".encode())]
        scope = {"type": "http", "method": method, "path": path, "headers": headers, "query_string": b""}
        await self.app(scope, receive, answered)
        return said[0], json.loads(body or b"{}")

    async def ask(self, **odd):
        return await self.send([json.dumps({**CHAT, **odd}).encode()])


@pytest.fixture
def served(on_stage):
    def run(play):
        async def main(context):
            context.run = context.run._replace(folder=Path("run"))
            await play(Server(context))

        on_stage(main, name="chat_server-1")

    return run


def test_a_client_that_leaves_frees_the_engine(served):
    async def play(server):
        server.context.actors["llm_proxy"] = server.hangs

        await server.send([json.dumps(CHAT).encode(), 1.0, None])

        assert len(server.left) == 1
        assert asyncio.get_running_loop().time() == 1.0
        server.context.actors["llm_proxy"] = server.complete
        assert (await server.ask())[0] == 200

    served(play)


@pytest.mark.parametrize(("rest", "status"), [([BODY_S + 1.0, b"}"], 408), ([None], 400)], ids=["slow", "leaves"])
def test_a_body_that_does_not_come_whole_is_not_waited_for(served, rest, status):
    async def play(server):
        found, told = await server.send([b'{"messages": ', *rest])

        assert (found, server.asked) == (status, [])
        assert "did not come whole" in told["error"]["message"]
        assert asyncio.get_running_loop().time() <= BODY_S

    served(play)


@pytest.mark.parametrize(("path", "method"), [("/v1/models", "GET"), ("/v1/chat/completions", "POST")])
def test_nobody_is_answered_without_the_token_nor_heard_out(served, monkeypatch, path, method):
    monkeypatch.setenv(TOKEN, "secret")

    async def play(server):
        status, _ = await server.send([1000.0], path, method, token="other")

        assert status == 401
        assert asyncio.get_running_loop().time() == 0, "the body was not waited for"

    served(play)


@pytest.mark.parametrize(
    "odd",
    [
        {"max_tokens": 0},
        {"max_tokens": -1},
        {"max_completion_tokens": 2**40},
        {"top_logprobs": 3},
        {"response_format": {"type": "json_object"}},
        {"presence_penalty": 0.5},
        {"logit_bias": {"5": 100}},
        {"functions": [{"name": "f"}]},
        {"messages": [{"role": "tool", "content": "the template refuses it"}]},
        {"messages": [{"role": "narrator", "content": "x"}]},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        {"messages": [{"role": "user", "content": None}]},
        {"messages": [{"role": "assistant", "content": None, "tool_calls": [{"function": 1}]}]},
        {"messages": ["x"]},
        {"messages": []},
    ],
    ids=str,
)
def test_what_would_change_the_answer_and_cannot_be_had_is_refused(served, odd):
    async def play(server):
        status, told = await server.ask(**odd)

        assert (status, server.asked) == (400, [])
        assert told["error"]["type"] == "invalid_request_error"
        assert told["error"]["message"]

    served(play)


def test_messages_come_in_every_form_that_the_api_has(served):
    async def play(server):
        call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
        said = {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None}
        result = {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "4"}, {"type": "text", "text": "2"}]}

        status, _ = await server.ask(messages=[*CHAT["messages"], said, result])

        assert status == 200
        assert server.asked[0].prompt == array("i", map(ord, "42")).tobytes()

    served(play)


def test_what_clients_say_to_ask_for_nothing_is_passed_over(served):
    async def play(server):
        nulls = dict.fromkeys(("temperature", "top_p", "seed", "model", "n", "stream", "logprobs", "response_format"))
        plain = {"response_format": {"type": "text"}, "logprobs": False, "frequency_penalty": 0.0, "logit_bias": {}}

        answers = [await server.ask(**nulls), await server.ask(**plain)]

        assert [status for status, _ in answers] == [200, 200]
        assert [(r.sampling.temperature, r.sampling.top_p) for r in server.asked] == [(1.0, 1.0)] * 2
        assert answers[0][1]["choices"][0]["message"]["content"] == "A"

    served(play)


def test_a_client_says_how_it_wants_its_answers_sampled_and_gets_several(served):
    async def play(server):
        how = {"temperature": 0.5, "top_p": 0.25, "seed": 7, "n": 3, "stop": ["B"], "max_completion_tokens": 9}

        _, told = await server.ask(**how)

        assert [choice["index"] for choice in told["choices"]] == [0, 1, 2]
        asked = [request.sampling for request in server.asked]
        assert {(each.temperature, each.top_p, each.max_new_tokens, each.stop) for each in asked} == {(0.5, 0.25, 9, ("Human:", "B"))}
        assert sorted(each.seed for each in asked) == [7, 8, 9]
        assert len({request.request_id for request in server.asked}) == 3

    served(play)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/responses", {"input": "wind 1", "temperature": 0}),
        ("/v1/messages", {"messages": CHAT["messages"], "max_tokens": 4, "temperature": 0}),
        ("/inference/v1/generate", {"token_ids": [65, 66], "sampling_params": {"temperature": 0}}),
    ],
)
def test_it_speaks_all_dialects_of_the_gateway(served, path, body):
    async def play(server):
        status, told = await server.send([json.dumps(body).encode()], path)

        assert (status, len(server.asked)) == (200, 1)
        assert server.asked[0].sampling.temperature == 0
        assert "A" in json.dumps(told) or told["choices"][0]["token_ids"] == [65]

    served(play)


def test_more_answers_than_ever_can_be_under_way_are_not_to_be_asked_for_again(served):
    async def play(server):
        server.actor.config = ChatServer.Config(chat={"max_concurrent": 2})

        status, told = await server.ask(n=3)

        assert (status, server.asked) == (400, [])
        assert "n: chat.max_concurrent=2" in told["error"]["message"]

    served(play)


def test_no_more_answers_are_under_way_than_the_config_says(served):
    async def play(server):
        server.actor.config = ChatServer.Config(chat={"max_concurrent": 2})
        server.context.actors["llm_proxy"] = server.hangs

        async with asyncio.TaskGroup() as tasks:
            waiting = [tasks.create_task(server.ask()) for _ in range(2)]
            await asyncio.sleep(1)
            status, told = await server.ask()
            for task in waiting:
                task.cancel()

        assert status == 503
        assert "chat.max_concurrent=2" in told["error"]["message"]
        server.context.actors["llm_proxy"] = server.complete
        assert (await server.ask())[0] == 200

    served(play)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "[::]", "192.0.2.1", ""])
def test_beyond_loopback_it_listens_with_a_token_alone(monkeypatch, host):
    config = ChatServer.Config(chat={"host": host})
    monkeypatch.delenv(TOKEN, raising=False)
    with pytest.raises(ConfigError, match=TOKEN):
        ChatServer.check_host(config)

    monkeypatch.setenv(TOKEN, "secret")
    ChatServer.check_host(config)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "[::1]", "localhost"])
def test_at_loopback_it_needs_none(monkeypatch, host):
    monkeypatch.delenv(TOKEN, raising=False)

    ChatServer.check_host(ChatServer.Config(chat={"host": host}))
