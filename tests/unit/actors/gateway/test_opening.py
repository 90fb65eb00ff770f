"""POST /sessions, whose client may leave at any moment."""

import asyncio
from collections import deque
from contextlib import suppress
from types import SimpleNamespace

import pytest

from rubato.actors.envs.manager import EnvManager
from rubato.actors.gateway.gateway import Gateway, GatewaySection, Opened
from rubato.actors.gateway.session import Refused
from tests.scripted_sessions import scripted_session


class Request:
    """Of a client that leaves when it is told to."""

    headers, path_params, scope = {}, {}, {}

    def __init__(self):
        self.gone = asyncio.Event()
        self.body = b"{}"

    async def receive(self):
        if self.body:
            body, self.body = self.body, b""
            return {"type": "http.request", "body": body}
        await self.gone.wait()
        return {"type": "http.disconnect"}


def gateway(wait_s=600):
    return SimpleNamespace(
        _server=SimpleNamespace(check_admin=lambda request: None),
        _section=SimpleNamespace(max_waiting=5, wait_s=wait_s, idle_s=600),
        _openings=deque(),
        _openings_changed=lambda: None,
        _refusal=None,
        _reached_at=lambda request: "http://gateway",
        _tasks={},
        _why_no_room=lambda: "no room",
    )


@pytest.mark.parametrize("how", ["leaves", "is cancelled"])
async def test_a_session_that_comes_as_its_client_leaves_gives_its_place_to_another(how):
    place, request, session = gateway(), Request(), scripted_session("hi")
    opening = asyncio.ensure_future(Gateway._open(place, request))  # noqa: TID251 - it ends before the test does
    while not place._openings:  # noqa: ASYNC110 - nothing else tells
        await asyncio.sleep(0)
    place._openings[0].opened.set_result(Opened(session, "prompt", ()))
    if how == "leaves":
        request.gone.set()
    else:
        opening.cancel()
    with pytest.raises(Refused if how == "leaves" else asyncio.CancelledError):
        await opening

    assert session.over == "cancelled"
    assert not place._openings


@pytest.mark.parametrize(("is_over", "status", "code"), [(True, 410, "run_over"), (False, 503, "draining")])
async def test_what_waits_is_refused_for_good_only_where_the_run_is_over(monkeypatch, is_over, status, code):
    """A gateway that drains leaves its place to the next one, at the same address."""

    async def admit(self):
        if not is_over:
            raise asyncio.CancelledError

    monkeypatch.setattr(EnvManager, "_admit", admit)
    place = Gateway.__new__(Gateway)
    vars(place).update(vars(gateway()), _tell_unasked=lambda: None)
    opening = asyncio.ensure_future(Gateway._open(place, Request()))  # noqa: TID251 - it ends before the test does
    while not place._openings:  # noqa: ASYNC110 - nothing else tells
        await asyncio.sleep(0)

    with suppress(asyncio.CancelledError):
        await Gateway._admit(place)

    for late in (opening, Gateway._open(place, Request())):
        with pytest.raises(Refused) as refused:
            await late
        assert (refused.value.status, refused.value.code) == (status, code)


@pytest.mark.parametrize(
    ("url", "host", "reached"),
    [
        ("https://train.example/rl", "10.0.0.5:8100", "https://train.example/rl"),
        ("", "train.example:8100", "http://train.example:8100"),
        ("", "[::1]:8100", "http://[::1]:8100"),
        ("", "a b", "http://0.0.0.0:8100"),
        ("", "", "http://0.0.0.0:8100"),
    ],
)
def test_agents_reach_the_gateway_where_the_one_that_opens_their_sessions_does(url, host, reached):
    place = SimpleNamespace(_section=GatewaySection(url=url), _url="http://0.0.0.0:8100")

    assert Gateway._reached_at(place, SimpleNamespace(headers={"host": host})) == reached


@pytest.mark.parametrize("url", ["train.example:8100", "ftp://train.example", "http://a b", "http://train.example/?a=1"])
def test_an_address_that_is_none_is_refused(url):
    with pytest.raises(ValueError, match="url"):
        GatewaySection(url=url)


async def test_one_that_waits_for_too_long_is_to_be_tried_again():
    place = gateway(wait_s=0.01)

    with pytest.raises(Refused, match="no room") as refused:
        await Gateway._open(place, Request())

    assert refused.value.status == 503
    assert not place._openings
