"""Environments behind OpenEnv's WebSocket protocol: against a server that speaks it, and against OpenEnv's own."""

import asyncio
import json
import re
import subprocess
from pathlib import Path

import pytest

from rubato.actors.envs.hosting import EnvFailure, EnvHost
from rubato.actors.envs.section import EnvSection

pytest.importorskip("websockets", reason="needs websockets: pip install -e '.[openenv]'")

from websockets.asyncio.client import connect
from websockets.asyncio.server import serve
from websockets.exceptions import ConnectionClosed

HERE = Path(__file__).resolve().parent
PEER = HERE.parents[1] / ".venv-openenv" / "bin" / "python"
"""Of an environment with openenv-core, which .ci/environments makes."""


class Server:
    """Counts to `goal` from the seed: an action is {"text": …}. What is to go wrong is written in the text."""

    def __init__(self, goal=2, most=8):
        self.goal, self.most = goal, most
        self.sessions, self.seen, self.sockets = 0, [], []

    async def session(self, socket):
        if self.sessions >= self.most:
            await self._error(socket, "CAPACITY_REACHED", "Server at capacity", active_sessions=self.sessions)
            return
        self.sessions += 1
        self.sockets.append(socket)
        try:
            await self._play(socket)
        except ConnectionClosed:
            pass
        finally:
            self.sessions -= 1

    async def _play(self, socket):
        turn = 0
        async for raw in socket:
            message = json.loads(raw)
            self.seen.append(message)
            if message["type"] == "close":
                return
            text = message["data"].get("text")
            if message["type"] == "reset":
                turn = 0
                await self._observe(socket, f"seed {message['data']['seed']}", None, done=False)
            elif not isinstance(text, str):
                await self._error(socket, "VALIDATION_ERROR", "Invalid message", errors=[{"loc": ["text"], "msg": "Field required"}])
            elif text == "raise":
                await self._error(socket, "EXECUTION_ERROR", "no such field")
            elif text == "babble":
                await socket.send("[1, 2")
            elif text == "leave":
                return
            elif text != "hang":
                turn += 1
                await self._observe(socket, text.upper(), None if text == "null" else 0.5, done=turn >= self.goal)

    async def _observe(self, socket, text, reward, *, done):
        await socket.send(json.dumps({"type": "observation", "data": {"observation": {"said": text}, "reward": reward, "done": done}}))

    async def _error(self, socket, code, message, **more):
        await socket.send(json.dumps({"type": "error", "data": {"code": code, "message": message, **more}}))


@pytest.fixture
async def server():
    server = Server()
    async with serve(server.session, "127.0.0.1", 0) as listening:
        server.port = listening.sockets[0].getsockname()[1]
        yield server


@pytest.fixture
async def host_of():
    hosts = []

    async def start(url, **kwargs):
        own = {"url": url, "action": "text", **kwargs}
        limits = {"reset_timeout_s": 20, "step_timeout_s": 1, "reset_tries": 1}
        hosts.append(EnvHost(EnvSection.model_validate({"class": "rubato.actors.envs.openenv:OpenEnv", "kwargs": own, **limits})))
        await hosts[-1].start()
        return hosts[-1]

    yield start
    for host in hosts:
        await host.close()


@pytest.fixture
async def env(server, host_of):
    host = await host_of(f"http://127.0.0.1:{server.port}")
    env = await host.borrow("train")
    await env.reset(7)
    yield env
    await env.close()


async def test_a_session_is_played_to_its_end_with_the_seed_and_the_servers_rewards(server, env):
    assert await env.reset(8) == ("seed 8", {})
    assert await env.step("hello") == ("HELLO", 0.5, False, False, {})
    assert await env.step("null") == ("NULL", 0.0, True, False, {})
    assert server.seen[-3:] == [
        {"type": "reset", "data": {"seed": 8}},
        {"type": "step", "data": {"text": "hello"}},
        {"type": "step", "data": {"text": "null"}},
    ]


async def test_each_instance_has_a_session_of_its_own_and_ends_it(server, host_of):
    host = await host_of(f"ws://127.0.0.1:{server.port}/ws")
    one, other = await host.borrow("train"), await host.borrow("train")
    await one.reset(1)
    await other.reset(2)
    assert server.sessions == 2

    await one.close()
    await other.close()

    async with asyncio.timeout(5):
        while server.sessions:  # noqa: ASYNC110 - nothing tells of the server's end of it
            await asyncio.sleep(0.01)


async def test_environments_run_in_the_managers_process(server, host_of):
    host = await host_of(f"http://127.0.0.1:{server.port}")

    assert not host.pooled


async def test_the_text_may_be_the_whole_action_and_what_is_none_is_an_invalid_turn(server, host_of):
    host = await host_of(f"http://127.0.0.1:{server.port}", action="")
    env = await host.borrow("train")
    await env.reset(1)

    no_json, refused = await env.step("up"), await env.step('{"move": "up"}')
    too_deep = await env.step('{"text": ' + "[" * 5000)
    taken = await env.step('{"text": "up"}')

    for none in (no_json, too_deep):
        assert (none[0][:23], none[4]) == ("This is no JSON object:", {"invalid": True})
    assert "Field required" in refused[0]
    assert refused[1:] == (0.0, False, False, {"invalid": True})
    assert taken[0] == "UP"


async def test_a_field_of_the_observation_that_is_not_there_is_named(server, host_of):
    host = await host_of(f"http://127.0.0.1:{server.port}", observation="text")
    env = await host.borrow("train")

    with pytest.raises(EnvFailure, match="the observation has no field text; it has said"):
        await env.reset(1)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("raise", "answered step with EXECUTION_ERROR: no such field"),
        ("babble", "answered step with no message of OpenEnv"),
        ("leave", "ConnectionClosed"),
        ("hang", "no answer within 1 s"),
    ],
)
async def test_what_goes_wrong_fails_the_rollout_alone_and_the_next_has_a_session_of_its_own(env, text, words):
    with pytest.raises(EnvFailure) as failed:
        await env.step(text)
    assert words in str(failed.value)

    if env.usable:
        assert (await env.reset(3))[0] == "seed 3"
        assert (await env.step("again"))[0] == "AGAIN"


async def test_a_session_that_the_server_ended_between_rollouts_is_opened_anew(server, env):
    await server.sockets[0].close()

    assert (await env.reset(5))[0] == "seed 5"


async def test_a_server_without_room_says_what_to_raise(server, host_of):
    server.most = 0
    host = await host_of(f"http://127.0.0.1:{server.port}")

    with pytest.raises(EnvFailure, match="has no room for a session more: raise its max_concurrent_envs to twice env"):
        await host.begin("train", 1)


async def test_no_server_is_named_with_its_address(server, host_of):
    host = await host_of("http://127.0.0.1:1")

    with pytest.raises(EnvFailure, match=re.escape("no OpenEnv server answers at ws://127.0.0.1:1/ws")):
        await host.begin("train", 1)


async def test_what_is_no_address_is_refused(host_of):
    host = await host_of("127.0.0.1:8000")

    with pytest.raises(EnvFailure, match=re.escape("url=127.0.0.1:8000 is no address of a server, such as http://127.0.0.1:8000")):
        await host.begin("train", 1)


# -- OpenEnv's own server --------------------------------------------------------------------------------------------


@pytest.fixture
async def peer():
    if not PEER.exists():
        pytest.skip(f"needs openenv-core in {PEER.parents[1].name}: .ci/environments install")
    process = await asyncio.create_subprocess_exec(str(PEER), str(HERE / "openenv_server.py"), stdout=subprocess.PIPE)
    try:
        async with asyncio.timeout(120):
            port = int((await process.stdout.readline()).split()[-1])
            while True:
                try:
                    async with connect(f"ws://127.0.0.1:{port}/ws"):
                        break
                except OSError:
                    await asyncio.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        await process.wait()


@pytest.mark.slow
async def test_openenvs_own_server_is_played(peer, host_of):
    host = await host_of(peer)
    env = await host.borrow("train")

    assert await env.reset(4) == ("ready 4", {})
    assert await env.step("hello") == ("hello", 5.0, False, False, {})
    assert await env.step("null") == ("null", 0.0, True, False, {})
    with pytest.raises(EnvFailure, match="EXECUTION_ERROR: as it was told"):
        await env.step("raise")
    assert (await env.reset(5))[0] == "ready 5"
    await env.close()


@pytest.mark.slow
async def test_openenvs_own_server_refuses_an_action_and_a_session_too_many(peer, host_of):
    host = await host_of(peer, action="word")
    one, other, third = [await host.borrow("train") for _ in range(3)]
    await one.reset(1)
    await other.reset(1)

    refused = await one.step("hello")

    assert refused[1:] == (0.0, False, False, {"invalid": True})
    assert "Field required" in refused[0]
    with pytest.raises(EnvFailure, match="has no room for a session more"):
        await third.reset(1)
