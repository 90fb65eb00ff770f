"""A sandbox has no way out, bounds what a program uses, and is never left out in silence."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import uuid
from pathlib import Path

import msgspec
import pytest

from rubato.actors.config import RewardSection
from rubato.actors.messages.samples import Score, Scores
from rubato.actors.rewards.scorer import Scorer
from rubato.runtime.bubblewrap import Bounds, Sandbox, sandboxed
from rubato.runtime.importer import KeptCode
from tests.jobs import rubato
from tests.sandboxes import needs_bwrap

ESCAPES = Path(__file__).with_name("escapes.py")
ROOT = Path(__file__).resolve().parents[2]
NOBODY = 65534

pytestmark = [pytest.mark.slow]


def section(**more):
    settings = {"functions": (f"{ESCAPES}:score",), "memory_mb": 512, "max_processes": 64, "timeout_s": 20}
    sandbox = {"sandbox": "bwrap", "sandbox_read": (str(ESCAPES.parent),), "sandbox_tmp_mb": 32}
    return RewardSection.model_validate({**settings, **sandbox, **more})


def request(escape, **columns):
    return Score("t1.1", ("text",), msgspec.msgpack.encode({"escape": escape, **columns}))


@contextlib.asynccontextmanager
async def scorer_of(**more):
    scorer = Scorer(section(**more))
    try:
        assert await scorer.start() == ""
        yield scorer
    finally:
        await scorer.close()


async def got_out(escape, columns, **more):
    async with scorer_of(**more) as scorer:
        (reply,) = await scorer.score([request(escape, **columns)])
        good = await scorer.score([request("reads", path="/nowhere")])
    assert good == [Scores((0.0,))]
    return reply


@pytest.fixture
def secret(tmp_path):
    file = tmp_path / "ssh" / "id_ed25519"
    file.parent.mkdir()
    file.write_text("private")
    return file


@pytest.fixture
def listening():
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@needs_bwrap
@pytest.mark.parametrize("path", ["/etc/shadow", "/etc/gshadow", "/proc/1/environ", str(Path.home() / ".profile"), "/var/lib/dpkg/status"])
async def test_no_file_of_the_host_is_read_beside_the_systems(path):
    assert await got_out("reads", {"path": path}) == Scores((0.0,))


@needs_bwrap
@pytest.mark.parametrize("escape", ["reads", "reads_through_proc", "writes"])
async def test_a_users_private_file_is_neither_read_nor_written(secret, escape):
    found = await got_out(escape, {"path": str(secret)})

    assert found == Scores((0.0,))
    assert secret.read_text() == "private"


@needs_bwrap
async def test_what_it_is_shown_it_reads_and_can_not_write(secret):
    shown = {"sandbox_read": (str(ESCAPES.parent), str(secret.parent))}

    assert await got_out("reads", {"path": str(secret)}, **shown) == Scores((1.0,))
    assert await got_out("writes", {"path": str(secret)}, **shown) == Scores((0.0,))


@needs_bwrap
def test_code_that_a_run_keeps_is_read_though_its_run_folder_is_within_what_is_shown(tmp_path, monkeypatch):
    tmp_path.chmod(0o755)
    code = tmp_path / "run" / "code"
    code.mkdir(parents=True)
    (tmp_path / "run").chmod(0o700)
    (tmp_path / "run" / "keys.json").write_text("private")
    (code / "files.json").write_text("{}")
    (tmp_path / "mine.txt").write_text("mine")
    monkeypatch.setenv("RUBATO_CODE", str(code))
    monkeypatch.setattr("rubato.runtime.bubblewrap.in_use", lambda: [KeptCode(code)])
    see = f"import os; print(open({str(code / 'files.json')!r}).read(), open({str(tmp_path / 'mine.txt')!r}).read())"
    argv, env = sandboxed((sys.executable, "-c", see), Sandbox(read=(str(tmp_path),)))

    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=60, check=False)

    assert (done.returncode, done.stdout) == (0, "{} mine\n"), done.stderr


ESCAPED = [
    "writes_everywhere",
    "changes_settings",
    "kills_parents",
    "mounts",
    "becomes_root",
    "fills_tmp",
    "maps_shared_memory",
    "lifts_limits",
]


@needs_bwrap
@pytest.mark.parametrize("escape", ESCAPED)
async def test_there_is_no_way_out(escape):
    assert await got_out(escape, {}) == Scores((0.0,))


@needs_bwrap
async def test_other_processes_are_not_seen():
    assert await got_out("sees_processes", {"pid": os.getpid()}) == Scores((0.0,))


@needs_bwrap
async def test_variables_stay_outside_unless_they_are_named(monkeypatch):
    monkeypatch.setenv("SOME_API_KEY", "of-the-launcher")

    assert await got_out("reads_environment", {"secret": "SOME_API_KEY"}) == Scores((0.0,))
    assert await got_out("reads_environment", {"secret": "SOME_API_KEY"}, sandbox_env=("SOME_API_KEY",)) == Scores((1.0,))


@needs_bwrap
async def test_there_is_no_network_unless_it_is_asked_for(listening):
    assert await got_out("connects", {"port": listening}) == Scores((0.0,))
    assert await got_out("connects", {"port": listening}, sandbox_network=True) == Scores((1.0,))


@needs_bwrap
async def test_abstract_sockets_of_the_host_are_not_reached():
    name = uuid.uuid4().hex
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(f"\0{name}")
        server.listen()

        assert await got_out("connects_to_abstract", {"name": name}) == Scores((0.0,))


AS_USER = """
import asyncio, json, os, sys
from tests.integration import test_sandbox as here

async def main():
    async with here.scorer_of() as scorer:
        for escape, columns in json.loads(sys.argv[1]).items():
            found = [await scorer.score([here.request(escape, **columns)]) for _ in range(2)]
            print(json.dumps([os.getuid(), escape, [getattr(reply, "scores", None) or [reply.reason] for (reply,) in found]]), flush=True)

asyncio.run(main())
"""


@needs_bwrap
@pytest.mark.skipif(os.geteuid() != 0, reason="the other tests are an ordinary user's already")
def test_there_is_no_way_out_for_an_ordinary_users_code(secret):
    """Whose workers keep his user id, in a namespace of users of their own."""
    user = {"user": NOBODY, "group": NOBODY, "extra_groups": [], "cwd": ROOT, "capture_output": True, "text": True, "check": False}
    try:
        tried = subprocess.run([sys.executable, "-c", "import rubato.runtime"], **user)
    except PermissionError:
        pytest.skip(f"another user may not run {sys.executable}")
    if tried.returncode:
        pytest.skip(f"another user can't run this Python: {tried.stderr[-200:]}")
    secret.chmod(0o644)
    os.chown(secret, NOBODY, NOBODY)
    path = {"path": str(secret)}
    tries = {"reads": path, "reads_through_proc": path, "writes": path, "reads_environment": {"secret": "PYTEST_CURRENT_TEST"}}
    tries |= {name: {} for name in (*sorted({*ESCAPED} - {"kills_parents"}), "new_namespace", "fork_bomb")}

    done = subprocess.run([sys.executable, "-c", AS_USER, json.dumps(tries)], timeout=120, **user)

    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert found == [[NOBODY, name, [[0.0], [0.0]]] for name in tries], done.stderr


async def ran(*command, bounds=None, **more):
    argv, env = sandboxed(command, Sandbox(bounds=bounds or Bounds()), more)
    process = await asyncio.create_subprocess_exec(*argv, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    output, _ = await process.communicate()
    return process.returncode, output.decode()


@needs_bwrap
async def test_a_command_runs_in_its_own_tmp_with_the_variables_that_it_is_given():
    mine = uuid.uuid4().hex
    code, output = await ran("sh", "-c", f"pwd; touch {mine} && echo $OPENAI_BASE_URL; exit 7", OPENAI_BASE_URL="http://x/v1")

    assert (code, output) == (7, "/tmp\nhttp://x/v1\n")
    assert not Path("/tmp", mine).exists()


@needs_bwrap
async def test_a_command_that_dies_of_a_signal_exits_as_shells_report_it():
    assert await ran("sh", "-c", "kill -SEGV $$") == (128 + signal.SIGSEGV, "")


@needs_bwrap
async def test_a_command_is_bounded_in_processor_time():
    code, _ = await ran("sh", "-c", "while :; do :; done", bounds=Bounds(cpu_s=1))

    assert code in (128 + signal.SIGKILL, 128 + signal.SIGXCPU)


@needs_bwrap
async def test_a_command_is_bounded_in_memory():
    code, output = await ran(sys.executable, "-c", "bytearray(1 << 30)", bounds=Bounds(memory_mb=512))

    assert code == 1
    assert "MemoryError" in output


@needs_bwrap
async def test_a_command_is_bounded_in_processes():
    code, output = await ran(sys.executable, "-c", "import os\nwhile True: os.fork()", bounds=Bounds(max_processes=20))

    assert code == 1
    assert "Resource temporarily unavailable" in output


@needs_bwrap
async def test_a_command_that_is_killed_takes_along_all_that_it_started():
    mark = uuid.uuid4().hex
    argv, env = sandboxed(("sh", "-c", "setsid sleep 1000 & setsid sleep 1000 & echo started; wait"), Sandbox(), {"MARK": mark})
    process = await asyncio.create_subprocess_exec(*argv, env=env, stdout=subprocess.PIPE)
    assert await process.stdout.readline() == b"started\n"
    assert len(marked(mark)) > 3

    process.kill()
    await process.wait()

    async with asyncio.timeout(10):
        while marked(mark):  # noqa: ASYNC110 - nothing tells of another process's end
            await asyncio.sleep(0.02)


def marked(mark):
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it ended
            state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
            found += [entry] * (state not in "ZX" and mark.encode() in (entry / "environ").read_bytes())
    return found


JOB = ("configs/quickstart.yaml", "run.steps=1", "eval.num_tasks=4", "eval.final_num_tasks=4", "env.class=examples/my_env.py:MyEnv",
       "reward.functions=[examples/my_reward.py:brevity]", "env.sandbox=bwrap", "reward.sandbox=bwrap")  # fmt: skip


@needs_bwrap
def test_a_job_trains_with_its_environments_and_rewards_in_sandboxes(tmp_path):
    done = rubato("launch", *JOB, "--run-dir", tmp_path / "run", cwd=ROOT)

    assert done.code == 0, done.err
    assert "0 failed" in done.out


def test_a_job_is_refused_with_a_sentence_where_there_is_no_bwrap(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))

    done = rubato("launch", *JOB, "--run-dir", tmp_path / "run", cwd=ROOT)

    assert done.code == 2
    said = " ".join(done.err.split())
    assert "env.sandbox=bwrap can't be had on this host: bwrap is not installed: apt install bubblewrap" in said
    assert "reward.sandbox=bwrap can't be had" in said
    assert not (tmp_path / "run").exists()


def test_a_bwrap_that_does_not_work_refuses_the_job_with_what_it_says(tmp_path, monkeypatch):
    fake = tmp_path / "bwrap"
    fake.write_text("#!/bin/sh\necho 'bwrap: No permissions to create a new namespace' >&2\nexit 1\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    done = rubato("launch", *JOB, "--run-dir", tmp_path / "run", cwd=ROOT)

    assert done.code == 2
    assert "can't be had on this host: bwrap: No permissions to create a new namespace" in done.err
