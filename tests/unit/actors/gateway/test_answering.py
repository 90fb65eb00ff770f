"""Turns of a session over HTTP: what is wrong is a status where it is known in time, a stream shows that it lives, and ends with its client."""

import asyncio
import json
from types import SimpleNamespace

import pytest

from rubato.actors.envs.recorder import GaveUp
from rubato.actors.gateway.answering import BEAT_S, DIALECTS, answer_in
from rubato.actors.gateway.session import MOST_AT_ONCE, Ask, Refused
from tests.scripted_sessions import app_of, refused_by_engine, scripted_session

BODIES = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "2 + 3?"}], "stream": True},
    "/v1/messages": {"messages": [{"role": "user", "content": "2 + 3?"}], "max_tokens": 99, "stream": True},
    "/v1/responses": {"input": "2 + 3?", "stream": True},
    "/inference/v1/generate": {"token_ids": [50, 51], "sampling_params": {}, "stream": True},
}

LIVES = {
    "/v1/chat/completions": b": waiting",
    "/v1/messages": b"event: ping",
    "/v1/responses": b"event: response.in_progress",
    "/inference/v1/generate": b": waiting",
}


class Client:
    """Posts one body, and leaves when it is told to."""

    def __init__(self):
        self.leaves = asyncio.Event()
        self.status, self.said = 0, b""
        self._sent = False

    async def post(self, session, path, body):
        scope = {"type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "query_string": b"", "headers": []}
        self._body = json.dumps(body).encode()
        await app_of(session)(scope, self._receive, self._send)

    async def _receive(self):
        if not self._sent:
            self._sent = True
            return {"type": "http.request", "body": self._body}
        await self.leaves.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message):
        self.status = message.get("status", self.status)
        self.said += message.get("body", b"")


@pytest.mark.parametrize("path", BODIES)
def test_a_stream_lives_while_its_answer_is_not_there(on_stage, path):
    client = Client()

    async def play(context):
        session = scripted_session("five")
        session.proxy.goes_on.clear()
        asking = context.spawn(client.post(session, path, BODIES[path]), name="client")
        await asyncio.sleep(BEAT_S * 3.5)
        session.proxy.goes_on.set()
        await asking

    on_stage(play)

    assert client.status == 200
    assert client.said.count(LIVES[path]) >= 2
    assert b"five" in client.said or b"102,105,118,101" in client.said


@pytest.mark.parametrize("path", BODIES)
def test_what_is_wrong_in_time_is_a_status_and_later_the_end_of_the_stream(on_stage, path):
    soon, late = Client(), Client()

    async def play(context):
        await soon.post(scripted_session(refused_by_engine()), path, BODIES[path])
        session = scripted_session(refused_by_engine())
        session.proxy.goes_on.clear()
        asking = context.spawn(late.post(session, path, BODIES[path]), name="client")
        await asyncio.sleep(BEAT_S * 1.5)
        session.proxy.goes_on.set()
        await asking

    on_stage(play)

    assert (soon.status, late.status) == (400, 200)
    assert b"it can't be" in soon.said
    assert b"it can't be" in late.said


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("after_s", [1.0, BEAT_S * 1.5])
def test_a_turn_ends_with_its_client(on_stage, path, after_s):
    async def play(context):
        session, client = scripted_session("five"), Client()
        session.proxy.goes_on.clear()
        asking = context.spawn(client.post(session, path, BODIES[path]), name="client")
        await asyncio.sleep(after_s)
        client.leaves.set()
        await asking
        assert len(session.proxy.asked) == 1
        assert session.forest.turns == []
        session.proxy.goes_on.set()
        await Client().post(session, path, BODIES[path])
        assert len(session.forest.turns) == 1

    on_stage(play)


def test_a_stream_whose_client_left_before_it_began_asks_nothing():
    asked = []
    session = SimpleNamespace(turns=asked.append)
    body = json.dumps(BODIES["/v1/chat/completions"]).encode()

    asyncio.run(answer_in(DIALECTS["/v1/chat/completions"], session, body, "m"))

    assert asked == []


def asks(session, **more):
    return Client().post(session, "/v1/chat/completions", BODIES["/v1/chat/completions"] | {"stream": False} | more)


async def test_requests_behind_one_history_are_drawn_by_seeds_of_their_own():
    session = scripted_session("five")

    await asks(session, n=3)
    await asks(session)

    assert len({request.sampling.seed for request in session.proxy.asked}) == 4
    assert len({request.request_id for request in session.proxy.asked}) == 4


async def test_of_several_answers_all_count_for_how_many_are_under_way():
    session = scripted_session("five")
    session.proxy.goes_on.clear()
    client, refused = Client(), Client()
    async with asyncio.TaskGroup() as tasks:
        asking = tasks.create_task(client.post(session, "/v1/chat/completions", BODIES["/v1/chat/completions"] | {"n": MOST_AT_ONCE}))
        while len(session.proxy.asked) < MOST_AT_ONCE:  # noqa: ASYNC110 - tasks of the session's own ask
            await asyncio.sleep(0)
        await refused.post(session, "/v1/chat/completions", BODIES["/v1/chat/completions"] | {"stream": False})
        session.proxy.goes_on.set()
        await asking

    assert (client.status, refused.status) == (200, 429)


async def test_of_several_answers_of_which_one_fails_none_is_kept():
    session = scripted_session("one", "two", refused_by_engine())
    await Client().post(session, "/v1/chat/completions", BODIES["/v1/chat/completions"])
    client = Client()

    await client.post(session, "/v1/chat/completions", BODIES["/v1/chat/completions"] | {"n": 2})

    assert client.status == 400
    assert [turn.text for turn in session.forest.turns] == [session.answer] == ["one"]
    assert len(session.recorder.transcripts) == 1


@pytest.mark.parametrize(("retry", "status"), [(True, 503), (False, 400)])
async def test_what_an_engine_refuses_is_not_to_be_tried_again(retry, status):
    session = scripted_session(GaveUp("generation_failed", "so", retry=retry))

    with pytest.raises(Refused) as refused:
        await session.turns(Ask([{"role": "user", "content": "2 + 3?"}]))

    assert (refused.value.status, refused.value.code) == (status, "generation_failed")
