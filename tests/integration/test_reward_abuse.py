"""Rewards can't hang or lie: one row per abuse, in real worker processes, as root and as an ordinary user."""

import asyncio
import contextlib
import gc
import json
import os
import signal
import stat
import subprocess
import sys
import uuid
from pathlib import Path

import msgspec
import pytest

from rubato.actors.config import RewardSection
from rubato.actors.messages.samples import NotScored, Score, Scores
from rubato.actors.rewards.scorer import Scorer
from rubato.runtime.pool import process as pool_process
from rubato.runtime.pool import sandbox
from rubato.runtime.pool.values import TEXT_LIMIT
from tests.sandboxes import needs_bwrap

ABUSES = Path(__file__).with_name("abuses.py")
ROOT = Path(__file__).resolve().parents[2]
MARK = "RUBATO_TEST_MARK"
PROCESSES_PER_WORKER = 2  # its init and itself

HANGS = 0.5
"""Deadline of rows that never end by themselves, seconds; others get 20."""

ROWS = [
    ("loop", HANGS, "timeout", "no answer within 0.5 s"),
    ("loop_in_c", HANGS, "timeout", "no answer within 0.5 s"),
    ("ignore_signals", HANGS, "timeout", "no answer within 0.5 s"),
    ("stop_itself", HANGS, "timeout", "no answer within 0.5 s"),
    ("segfault", 20, "crashed", "SIGSEGV"),
    ("abort", 20, "crashed", "SIGABRT"),
    ("kill_group", 20, "crashed", "SIGKILL"),
    ("memory_hog", 20, "memory", "raised MemoryError()"),
    ("sys_exit", 20, "exited", "exit code 0"),
    ("os_exit", 20, "exited", "exit code 0"),
    ("interrupt", 20, "crashed", "SIGINT"),
    ("exception", 20, "raised", "ValueError('no such answer')"),
    ("huge_exception", 20, "raised", "raised ValueError('xxx"),
    ("cancelled", 20, "raised", "raised CancelledError()"),
    ("cancelled_later", 20, "raised", "raised CancelledError()"),
    ("generator_exit", 20, "raised", "raised GeneratorExit('no more')"),
    ("surrogate_repr", 20, "raised", r"raised Surrogate('\ud800')"),
    ("broken_repr", 20, "raised", "raised Broken at "),
    ("huge_name", 20, "raised", r"Long\ud800Long"),
    ("nan", 20, "not_finite", "returned nan"),
    ("infinite", 20, "not_finite", "returned -inf"),
    ("huge", 20, "out_of_range", "returned 1e+200, more than ±1e+30"),
    ("huge_integer", 20, "wrong_type", "can't be sent"),
    ("word", 20, "wrong_type", "a str instead of a number"),
    ("none", 20, "wrong_type", "a NoneType instead of a list"),
    ("scalar", 20, "wrong_type", "a float instead of a list"),
    ("wrong_length", 20, "wrong_length", "2 numbers for 1"),
    ("large_result", 20, "too_large", "at most 10,485,760"),
    ("flood_stdout", 20, "too_much_output", "printed more than 8,388,608 bytes"),
    ("flood_stderr", 20, "too_much_output", "printed more than 8,388,608 bytes"),
    ("endless_output", 60, "too_much_output", "printed more than 8,388,608 bytes"),
    ("close_pipes", 20, "broke_channel", "closed its worker's own socket"),
    ("close_pipes_and_loop", 20, "broke_channel", "closed its worker's own socket"),
    ("write_to_pipes", 20, "broke_channel", "wrote to its worker's own socket"),
    ("fork_and_write", 20, "broke_channel", "wrote to its worker's own socket"),
    ("fork_and_return_twice", 20, "", ""),
    ("leave_grandchild", 20, "left_processes", "left processes running: python"),
    ("exit_and_leave_children", 20, "exited", "exit code 5"),
]

BOMBS = [
    ("fork_bomb", 20, "raised", "BlockingIOError(11, 'Resource temporarily unavailable') at"),
    ("threads", 20, "raised", "(reward.memory_mb=512, reward.max_processes=64)"),
    ("escaping_bomb", 1.0, "timeout", "no answer within 1 s"),
]

needs_own_uid = pytest.mark.skipif(os.geteuid() == 0 and bool(sandbox.shortcoming()), reason=f"unbounded here: {sandbox.shortcoming()}")
needs_linux = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
pytestmark = [needs_linux, pytest.mark.slow]


def section(timeout_s, **more):
    settings = {"functions": (f"{ABUSES}:score",), "memory_mb": 512, "max_processes": 64}
    return RewardSection.model_validate({**settings, "timeout_s": timeout_s, **more})


def request(abuse):
    return Score("t1.1", ("text",), msgspec.msgpack.encode({"abuse": abuse}))


def marked():
    """Processes that descend from this one, whatever they did since: the mark is in the environment they began with."""
    mark = f"{MARK}={os.environ[MARK]}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and mark in (entry / "environ").read_bytes():
                state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
                found += [int(entry.name)] * (state not in "ZX")
        except OSError:
            continue  # it ended
    return found


def num_fds():
    return len(os.listdir("/proc/self/fd"))


async def until(condition):
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 - nothing tells of another process's end
            await asyncio.sleep(0.02)


@pytest.fixture(autouse=True)
def hard_stop(monkeypatch):
    """Whatever a row leaves behind, were it a bomb, ends here: everything under the uids of its workers, and all that is marked."""
    monkeypatch.setenv(MARK, uuid.uuid4().hex)
    uids = []
    choose_uid = sandbox.choose_uid

    def recorded():
        uids.append(choose_uid())
        return uids[-1]

    monkeypatch.setattr(pool_process, "choose_uid", recorded)
    yield
    left = marked()
    for uid in filter(None, set(uids)):
        end_all_of(uid)
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    assert left == []


def end_all_of(uid):
    child = os.fork()
    if child == 0:
        try:
            sandbox.become(uid, 0)
            if sandbox.is_powerless(uid):
                os.kill(-1, signal.SIGKILL)
        finally:
            os._exit(0)
    os.waitpid(child, 0)


SANDBOX = {"sandbox": "bwrap", "sandbox_read": [str(ABUSES.parent)], "sandbox_env": [MARK]}


async def run_row(abuse, timeout_s, reason, words, **where):
    scorer = Scorer(section(timeout_s, **where))
    assert await scorer.start() == ""
    assert await scorer.score([request("good")]) == [Scores((1.0,))]
    gc.collect()  # what tests before left open would otherwise be closed in between
    fds, processes = num_fds(), len(marked())

    async with asyncio.timeout(timeout_s + 10):
        (reply,) = await scorer.score([request(abuse)])

    if reason:
        assert isinstance(reply, NotScored), reply
        assert (reply.reason, words in reply.detail) == (reason, True), reply
        assert f"{ABUSES}:score" in reply.detail
        assert len(reply.detail) < 2 * TEXT_LIMIT + 1_000
    else:
        assert reply == Scores((1.0,))
    assert await scorer.score([request("good")]) == [Scores((1.0,))]
    assert [worker.alive for worker in scorer._local._pool._workers] == [True]
    await until(lambda: num_fds() <= fds and len(marked()) == processes)
    await scorer.close()
    await until(lambda: marked() == [])


@pytest.mark.parametrize(("abuse", "timeout_s", "reason", "words"), ROWS, ids=[row[0] for row in ROWS])
async def test_an_abuse_ends_as_a_named_error_and_leaves_nothing(abuse, timeout_s, reason, words):
    await run_row(abuse, timeout_s, reason, words)


@needs_own_uid
@pytest.mark.parametrize(("abuse", "timeout_s", "reason", "words"), BOMBS, ids=[row[0] for row in BOMBS])
async def test_a_bomb_is_bounded_and_ends_as_a_named_error(abuse, timeout_s, reason, words):
    await run_row(abuse, timeout_s, reason, words)


@needs_bwrap
@pytest.mark.parametrize(("abuse", "timeout_s", "reason", "words"), ROWS, ids=[row[0] for row in ROWS])
async def test_an_abuse_in_a_sandbox_ends_in_the_same_way(abuse, timeout_s, reason, words):
    await run_row(abuse, timeout_s, reason, words, **SANDBOX)


@needs_bwrap
@pytest.mark.parametrize(("abuse", "timeout_s", "reason", "words"), BOMBS, ids=[row[0] for row in BOMBS])
async def test_a_bomb_in_a_sandbox_is_bounded(abuse, timeout_s, reason, words):
    await run_row(abuse, timeout_s, reason, words, **SANDBOX)


AS_USER = """
import asyncio, json, sys
from rubato.runtime.pool import sandbox
uid = int(sys.argv[1])
if uid:
    sandbox.become(uid, 1 << sandbox.CAP_DAC_READ_SEARCH)
from tests.integration import test_reward_abuse as rows

async def main():
    scorer = rows.Scorer(rows.section(2.0))
    print(json.dumps([await scorer.start(), rows.os.getuid()]), flush=True)
    for abuse in sys.argv[2:]:
        (reply,) = await scorer.score([rows.request(abuse)])
        good = await scorer.score([rows.request("good")])
        uid = await scorer.score([rows.request("own_uid")])
        print(json.dumps([abuse, reply.reason, good[0].scores, uid[0].scores]), flush=True)
    await scorer.close()

asyncio.run(main())
"""


@needs_own_uid
def test_an_ordinary_users_workers_are_bounded_too():
    """Under another uid than root, which its workers then keep and share with it."""
    uid = sandbox.choose_uid()
    abuses = ["loop", "fork_bomb", "escaping_bomb", "leave_grandchild", "exit_and_leave_children"]

    command = (sys.executable, "-c", AS_USER, str(uid), *abuses)
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)

    if uid:
        end_all_of(uid)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert lines[0] == ["", uid or os.getuid()], done.stderr
    reasons = ["timeout", "raised", "timeout", "left_processes", "exited"]
    assert lines[1:] == [[a, r, [1.0], [float(lines[0][1])]] for a, r in zip(abuses, reasons, strict=True)], done.stderr
    assert marked() == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root's workers change their uid")
@needs_own_uid
async def test_roots_workers_have_a_uid_each_and_read_private_folders_without_writing_there(tmp_path):
    private = tmp_path / "private"
    private.mkdir(mode=0o700)
    file = private / "mine.py"
    file.write_text(ABUSES.read_text())
    file.chmod(stat.S_IRUSR)
    functions = (f"{file}:score",)

    scorers = [Scorer(section(20, functions=functions)) for _ in range(2)]
    uids = [(await scorer.score([request("own_uid")]))[0].scores[0] for scorer in scorers]
    for scorer in scorers:
        await scorer.close()
    writer = Scorer(section(20, functions=(f"{file}:write_beside",)))
    (refused,) = await writer.score([request("good")])
    await writer.close()

    assert len(set(uids)) == 2
    assert all(sandbox.FIRST_UID <= uid < sandbox.LAST_UID for uid in uids)
    assert isinstance(refused, NotScored)
    assert "PermissionError" in refused.detail


async def test_what_escaped_dies_with_a_killed_parent():
    """SIGKILL of the process that owns the pool, while a worker and its escaped grandchild run."""
    code = (
        "import asyncio\n"
        "from tests.integration import test_reward_abuse as rows\n"
        "async def main():\n"
        "    scorer = rows.Scorer(rows.section(1000.0))\n"
        "    await scorer.start()\n"
        "    print('ready', flush=True)\n"
        "    await scorer.score([rows.request('grandchild_and_loop')])\n"
        "asyncio.run(main())\n"
    )
    parent = await asyncio.create_subprocess_exec(sys.executable, "-c", code, stdout=subprocess.PIPE, cwd=ROOT)
    assert await parent.stdout.readline() == b"ready\n"
    await until(lambda: len(marked()) == 1 + PROCESSES_PER_WORKER + 1)
    parent.kill()
    await parent.wait()

    await until(lambda: marked() == [])


async def test_ten_kills_leak_no_memory_of_the_owner():
    """Nothing that belonged to a killed worker is held: neither a process object, nor its buffers and timers."""
    import gc

    scorer = Scorer(section(20))
    for _ in range(10):
        await scorer.score([request("os_exit")])
    await scorer.score([request("good")])
    await until(lambda: len(marked()) == PROCESSES_PER_WORKER)
    await scorer.score([request("os_exit")])
    await scorer.score([request("good")])
    await asyncio.sleep(2 * pool_process.LAST_WORDS_S)  # their last timers run out
    gc.collect()
    held = [thing for thing in gc.get_objects() if type(thing) is pool_process.WorkerProcess]
    await scorer.close()

    assert len(held) <= 2  # the live one, and the last that ended
