"""A server with bounds: clients that are slow, silent, many or verbose cost others nothing."""

import asyncio
from contextlib import asynccontextmanager, suppress

import pytest
import uvicorn

from rubato.bus.address import bind_listener
from rubato.runtime.errors import ConfigError
from rubato.runtime.http_server import CLIENT, QUIET, HttpServer, bearer_of, check_token, is_let_in, send_json, token_in

HEAD_BYTES = 4096
BIG = 32 * 2**20
"""More than the buffers of two sockets hold."""


async def application(scope, receive, send):
    if scope["path"] == "/json":
        await send_json(scope, send, b"{}")
        return
    body = b"x" * (BIG if scope["path"] == "/big" else 2)
    await send(
        {"type": "http.response.start", "status": 200, "headers": [(b"connection", b"close"), (b"content-length", b"%d" % len(body))]}
    )
    await send({"type": "http.response.body", "body": body})


@asynccontextmanager
async def served(most=4, life_s=30.0, app=application):
    listening = bind_listener("127.0.0.1", 0)
    server = HttpServer(uvicorn.Config(app, http="h11", h11_max_incomplete_event_size=HEAD_BYTES, log_level="critical", **QUIET))
    async with asyncio.TaskGroup() as tasks:
        serving = tasks.create_task(server.answer_on(listening, most, life_s=life_s))
        yield listening.getsockname()[1]
        serving.cancel()


async def said(port, request=b"GET / HTTP/1.1\r\nHost: h\r\n\r\n"):
    """All that comes before the connection ends, however it does."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request)
    try:
        return await reader.read()
    except ConnectionError:
        return b""
    finally:
        writer.close()


async def test_who_says_nothing_and_who_reads_nothing_is_let_go_and_others_are_answered():
    async with served(life_s=0.5) as port:
        deaf, asks = await asyncio.open_connection("127.0.0.1", port)
        asks.write(b"GET /big HTTP/1.1\r\nHost: h\r\n\r\n")
        silent, nothing = await asyncio.open_connection("127.0.0.1", port)

        answered = await said(port)
        ended = await silent.read()  # it came later, so the other's time is over too
        read = b""
        with suppress(ConnectionError):
            while piece := await deaf.read(2**20):
                read += piece
        asks.close()
        nothing.close()

    assert answered.endswith(b"\r\n\r\nxx")
    assert ended == b""
    assert len(read) < BIG


async def test_more_connections_than_there_may_be_end_at_once_until_there_is_room():
    async with served(most=2) as port:
        held = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
        refused = await said(port)
        for _, writer in held:
            writer.close()
            await writer.wait_closed()
        while not (answered := await said(port)):
            pass

    assert refused == b""
    assert answered.endswith(b"xx")


@pytest.mark.parametrize("num", [1, 3])
async def test_answers_that_are_written_at_once_come_whole_also_where_the_connection_ends_behind_them(num):
    ask, last = b"GET /json HTTP/1.1\r\nHost: h\r\n\r\n", b"GET /json HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n"
    async with served() as port:
        answered = await said(port, ask * (num - 1) + last)

    assert answered.count(b"HTTP/1.1 200 OK\r\n") == num
    assert answered.count(b"\r\n\r\n{}") == num


async def test_what_waits_for_a_client_is_cancelled_as_that_leaves():
    waits, ended = asyncio.Event(), asyncio.Event()

    async def wait(scope, receive, send):
        scope["state"][CLIENT].asks = asyncio.current_task()
        waits.set()
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            ended.set()

    async with served(app=wait) as port:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET / HTTP/1.1\r\nHost: h\r\n\r\n")
        await waits.wait()
        writer.close()
        async with asyncio.timeout(30):
            await ended.wait()


async def test_a_head_that_does_not_end_is_refused():
    async with served() as port:
        answered = await said(port, b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * HEAD_BYTES)

    assert b"xx" not in answered


async def test_its_end_ends_connections_that_are_open():
    async with served(life_s=3600.0) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        assert (await said(port)).endswith(b"xx")
    with suppress(ConnectionError):
        assert await reader.read() == b""
    writer.close()


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "[::1]", "localhost"])
def test_on_the_loopback_no_token_is_needed(monkeypatch, host):
    monkeypatch.delenv("A_TOKEN", raising=False)
    check_token("some.host", host, "A_TOKEN")


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.5", "", "a.name"])
def test_beyond_the_loopback_there_has_to_be_one(monkeypatch, host):
    monkeypatch.setenv("A_TOKEN", " \n")
    with pytest.raises(ConfigError, match="is reached from outside, and A_TOKEN is not set"):
        check_token("some.host", host, "A_TOKEN")
    monkeypatch.setenv("A_TOKEN", "secret")
    check_token("some.host", host, "A_TOKEN")


def test_a_key_is_let_in_by_its_token_alone():
    assert [is_let_in(bearer_of(told), "t") for told in ("Bearer t", "bearer t", "t", "Bearer x", "Basic t", "")] == [True] * 3 + [
        False
    ] * 3
    assert is_let_in("whatever", "")


@pytest.mark.parametrize("token", ["p\u00e4", "a\tb", "\u20ac"])
def test_a_token_that_no_header_holds_is_refused(monkeypatch, token):
    monkeypatch.setenv("A_TOKEN", token)

    with pytest.raises(ConfigError, match="A_TOKEN has a sign that a header of HTTP can't hold"):
        token_in("A_TOKEN")
