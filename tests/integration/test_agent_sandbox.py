"""An agent in a sandbox reaches its session, and nothing else of what is outside."""

import asyncio
import contextlib
import json
import os
import socket
import sys
import uuid
from collections import Counter
from pathlib import Path

import pytest

from rubato.actors.envs.section import EnvSection
from rubato.actors.gateway.command import AgentEnded, run_command, words_of
from rubato.actors.gateway.sandboxed import MOST_CONNECTIONS, AgentSandbox
from rubato.actors.gateway.server import SessionServer
from rubato.bus.address import bind_listener
from rubato.runtime.errors import ExitCode
from tests.chaos.test_kills import until
from tests.integration.test_agents import AGENTS, COMMAND, lasting, managers_end
from tests.integration.test_sandbox import marked
from tests.jobs import SMALL, left_behind, rubato, write_model
from tests.sandboxes import needs_bwrap
from tests.scripted_sessions import scripted_session

ESCAPES = Path(__file__).with_name("escapes.py")

pytestmark = [pytest.mark.slow, needs_bwrap]

SETTINGS = {"sandbox": "bwrap", "sandbox_read": [str(ESCAPES.parent)], "sandbox_tmp_mb": 32, "memory_mb": 512, "max_processes": 64}

ASKS = """
import json, os, urllib.request
task = json.load(open(os.environ["RUBATO_TASK_FILE"]))
body = json.dumps({"messages": [{"role": "user", "content": task["prompt"]}]}).encode()
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
asked = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
told = json.load(urllib.request.urlopen(asked))
print(json.dumps({"answer": told["choices"][0]["message"]["content"]}))
"""


class Place:
    """A session's server as environment managers have it, and agents in sandboxes."""

    def __init__(self, server, port, session, sandbox):
        self.server, self.port, self.session, self.sandbox = server, port, session, sandbox

    async def said(self, code, **told):
        """What a Python program says at its end."""
        url = f"http://127.0.0.1:{self.port}/sessions/{self.session.id}"
        variables = {"OPENAI_BASE_URL": f"{url}/v1", "OPENAI_API_KEY": self.session.key, "RUBATO_SESSION_URL": url}
        words = [sys.executable, "-c", code]
        found = await run_command(words, variables, told, start=self.sandbox.start, most_output=self.sandbox.most_output)
        return found.get("reward", found.get("answer"))

    async def tried(self, escape, **columns):
        """1 where it got out."""
        call = f"escapes.score(['text'], ['{escape}'], **{ {key: [value] for key, value in columns.items()}!r})"
        return await self.said(f"import json, sys; sys.path.append({str(ESCAPES.parent)!r}); import escapes\n"
                               f"print(json.dumps({{'reward': {call}[0]}}))")  # fmt: skip


@contextlib.asynccontextmanager
async def place_of(**more):
    server, listening, session = SessionServer("run"), bind_listener("127.0.0.1", 0), scripted_session("well said")
    server.add(session)
    port = listening.getsockname()[1]
    section = EnvSection.model_validate({**SETTINGS, **more})
    async with asyncio.TaskGroup() as tasks:
        serving = tasks.create_task(server.serve(listening))
        await asyncio.sleep(0)
        yield Place(server, port, session, AgentSandbox(section, server, lambda: port))
        serving.cancel()


@pytest.mark.parametrize("network", [False, True])
async def test_an_agent_talks_to_its_session_with_and_without_a_network(network):
    async with place_of(sandbox_network=network) as place:
        assert await place.said(ASKS, prompt="hi") == "well said"

    assert len(place.session.forest.turns) == 1


async def test_a_function_and_its_task_are_read_in_a_sandbox_of_its_own(tmp_path):
    tmp_path.chmod(0o755)  # a sandbox of root's has another user id
    (tmp_path / "mine.py").write_text("async def play(task):\n    return task.prompt * 2\n")
    words = words_of(f"{tmp_path}/mine.py:play", is_process=True)

    async with place_of(sandbox_read=[str(tmp_path)]) as place:
        assert await run_command(words, {}, {"prompt": "ab"}, start=place.sandbox.start) == {"answer": "abab"}


async def test_one_that_can_not_be_started_says_so():
    async with place_of() as place:
        with pytest.raises(AgentEnded, match="can't be started: No such file or directory: no-such-command"):
            await run_command(["no-such-command"], {}, {}, start=place.sandbox.start)


@pytest.mark.parametrize("escape", ["reads", "lists", "reads_through_proc", "writes"])
async def test_neither_the_run_s_folder_nor_that_of_another_agent_s_task_is_reached(tmp_path, escape):
    kept = tmp_path / "run" / "samples.jsonl"
    kept.parent.mkdir()
    kept.write_text("{}")
    wanted = kept.parent if escape == "lists" else kept

    async with place_of() as place:
        assert await place.tried(escape, path=str(wanted)) == 0.0
        assert await place.said("import glob, json; print(json.dumps({'reward': len(glob.glob('/tmp/rubato-agent-*'))}))") == 1
    assert kept.read_text() == "{}"


ESCAPED = ["writes_everywhere", "kills_parents", "mounts", "becomes_root", "fork_bomb", "fills_tmp", "maps_shared_memory", "lifts_limits"]


@pytest.mark.parametrize("escape", ESCAPED)
async def test_there_is_no_way_out(escape):
    async with place_of() as place:
        assert await place.tried(escape) == 0.0


async def test_when_memory_runs_out_it_is_ended_before_an_actor():
    async with place_of() as place:
        assert await place.said("print('{\"reward\": ' + open('/proc/self/oom_score_adj').read().strip() + '}')") == 1000


async def test_other_processes_and_their_variables_are_not_seen(monkeypatch):
    monkeypatch.setenv("SOME_API_KEY", "of-the-launcher")

    async with place_of() as place:
        assert await place.tried("sees_processes", pid=os.getpid()) == 0.0
        assert await place.tried("reads_environment", secret="SOME_API_KEY") == 0.0


async def test_of_the_network_it_has_the_address_of_the_sessions_alone():
    name = uuid.uuid4().hex
    with socket.create_server(("127.0.0.1", 0)) as other, socket.socket(socket.AF_UNIX) as abstract:
        abstract.bind(f"\0{name}")
        abstract.listen()
        async with place_of() as place:
            assert await place.tried("connects", port=place.port) == 1.0
            assert await place.tried("connects", port=other.getsockname()[1]) == 0.0
            assert await place.tried("connects_to_abstract", name=name) == 0.0
            assert await place.said(REACHES) == 0


REACHES = """
import json, os, socket
def reached(family, address):
    with socket.socket(family) as ours:
        ours.settimeout(5)
        try:
            return not ours.connect(address)
        except OSError:
            return False
port = int(os.environ["OPENAI_BASE_URL"].split(":")[2].split("/")[0])
tried = [(socket.AF_INET, ("192.0.2.1", 80)), (socket.AF_INET6, ("::1", port)), (socket.AF_INET, ("10.0.0.1", port))]
inherited = [fd for fd in os.listdir("/proc/self/fd") if int(fd) > 2 and os.path.exists(f"/proc/self/fd/{fd}")]
print(json.dumps({"reward": sum(reached(*each) for each in tried) + len(inherited)}))
"""


async def test_one_session_s_agent_has_no_other_s():
    async with place_of() as place:
        other = scripted_session("not for you")
        place.server.add(other)
        code = ASKS.replace('os.environ["OPENAI_BASE_URL"]', f'os.environ["OPENAI_BASE_URL"].replace("{place.session.id}", "{other.id}")')
        with pytest.raises(AgentEnded, match="HTTP Error 401"):
            await place.said(code, prompt="hi")

    assert other.forest.turns == []


async def test_one_that_prints_without_end_is_ended():
    async with place_of() as place:
        with pytest.raises(AgentEnded, match="printed more than 8,388,608 bytes"):
            await place.said("while True: print('x' * 1000)")


async def test_one_that_connects_without_end_leaves_the_server_to_others():
    code = f"""
import json, os, socket, time
port = int(os.environ["OPENAI_BASE_URL"].split(":")[2].split("/")[0])
opened = [socket.create_connection(("127.0.0.1", port)) for _ in range({MOST_CONNECTIONS + 100})]
for each in opened: each.settimeout(20)
ended = 0
for each in opened[{MOST_CONNECTIONS}:]:
    try:
        ended += not each.recv(1)
    except ConnectionError:
        ended += 1
print(json.dumps({{"reward": ended}}))
"""
    async with place_of() as place:
        flood, answer = await asyncio.gather(place.said(code), place.said(ASKS, prompt="hi"))

    assert (flood, answer) == (100, "well said")


async def test_one_that_is_given_up_takes_along_all_that_it_started():
    mark = uuid.uuid4().hex
    code = f"import subprocess; subprocess.Popen(['setsid', 'sleep', '1000'], env={{'MARK': '{mark}', 'PATH': '/usr/bin'}}); {ASKS.strip()}"
    async with place_of() as place, asyncio.TaskGroup() as tasks:
        place.session.proxy.goes_on.clear()
        playing = tasks.create_task(place.said(code, prompt="hi"))
        while not place.session.proxy.asked:  # noqa: ASYNC110 - nothing else tells
            await asyncio.sleep(0.02)
        assert marked(mark)
        playing.cancel()
        async with asyncio.timeout(10):
            while marked(mark):  # noqa: ASYNC110 - nothing tells of another process's end
                await asyncio.sleep(0.02)


@pytest.fixture
def job_place(tmp_path):
    """Of a job whose agents and environments are in sandboxes."""
    (tmp_path / "mine.py").write_text(AGENTS)
    (tmp_path / "agents").mkdir()
    (tmp_path / "agents" / "agent.py").write_text(COMMAND)
    (tmp_path / "small.yaml").write_text(SMALL.replace("isolation: inline, ", "sandbox: bwrap, sandbox_read: [agents], "))
    write_model(tmp_path / "model")
    return tmp_path


@pytest.mark.parametrize("agent", [pytest.param("mine.py:answers", marks=pytest.mark.nightly), "mine.py:plain", "COMMAND"])
def test_a_job_trains_an_agent_of_each_kind_in_sandboxes(job_place, agent):
    agent = f"{sys.executable} {job_place}/agents/agent.py" if agent == "COMMAND" else agent

    ended = rubato(
        "launch", "small.yaml", "--run-dir", "run", f"model.path={job_place / 'model'}", "env.class=mine.py:Echo", f"env.agent={agent}",
        cwd=job_place,
    )  # fmt: skip

    assert ended.code == ExitCode.DONE, ended.out + ended.err
    samples = [json.loads(line) for line in (job_place / "run" / "samples.jsonl").read_text().splitlines()]
    used = Counter(line["fate"] for line in samples if line["fate"] in ("trained", "zero_spread"))
    assert used.total() == 2 * 4
    assert left_behind(job_place) == []


def test_agents_in_sandboxes_end_with_a_manager_that_is_killed(job_place):
    agent = job_place / "agents" / "agent.py"
    agent.write_text(COMMAND + "import time; time.sleep(3600)")

    with lasting(job_place, f"env.agent={sys.executable} {agent}") as folder:
        until(lambda: [line for line in left_behind(job_place) if line.startswith("bwrap ") and str(agent) in line], "agents that play")
        managers_end(folder)
