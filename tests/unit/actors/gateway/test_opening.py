"""POST /sessions, whose client may leave at any moment."""

import asyncio
from collections import deque
from types import SimpleNamespace

import pytest

from rubato.actors.gateway.gateway import Gateway, Opened
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
        _takes_more=True,
        _tasks={},
        _url="http://gateway",
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


async def test_one_that_waits_for_too_long_is_to_be_tried_again():
    place = gateway(wait_s=0.01)

    with pytest.raises(Refused, match="no room") as refused:
        await Gateway._open(place, Request())

    assert refused.value.status == 503
    assert not place._openings
