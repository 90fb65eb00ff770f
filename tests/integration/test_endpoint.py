"""Node agents serve metrics and health: what dies is seen to be down and to come back, and so is a Redis that is stopped."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests.jobs import SMALL, clean_environment, left_behind, rubato, write_model

pytestmark = pytest.mark.slow

LIMIT_S = 60.0
TOKEN = "a-token-of-the-test"


def until(condition, what):
    """What `condition` returns once it is true; the processes under test can only be watched from outside."""
    deadline = time.perf_counter() + LIMIT_S
    while not (found := condition()):
        assert time.perf_counter() < deadline, f"{what} did not happen within {LIMIT_S} s"
        time.sleep(0.02)  # noqa: TID251 - another process's progress can't be awaited
    return found


@contextmanager
def started(log: Path, *arguments: object, stdin: str = "", token: str = "") -> Iterator["subprocess.Popen[str]"]:
    environment = {**clean_environment(), **({"RUBATO_HOST_TOKEN": token} if token else {})}
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "rubato.runtime.cli", *map(str, arguments)],
            cwd=log.parent, env=environment, stdin=subprocess.PIPE, stdout=file, stderr=file, start_new_session=True, text=True,
        )  # fmt: skip
    try:
        process.stdin.write(stdin)
        process.stdin.close()
        yield process
    finally:
        process.kill()
        process.wait()


def get(url: str, token: str = "") -> tuple[int, str]:
    """Status and body; (0, "") where nobody answers."""
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"}), timeout=10) as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as refused:
        return refused.code, refused.read().decode()
    except OSError:
        return 0, ""


def url_of(run: Path, node: str) -> str:
    log = run / "logs" / f"{node}.jsonl"
    events = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    return next((event["url"] for event in events if event.get("event") == "listening"), "")


def figure(url: str, name: str, token: str = "", **labels: str) -> float | None:
    """Of /metrics, where one has these labels."""
    for line in get(f"{url}/metrics", token)[1].splitlines():
        if line.startswith(f"{name}{{") and all(f'{key}="{value}"' in line for key, value in labels.items()):
            return float(line.rpartition(" ")[2])
    return None


def test_a_killed_actor_a_stopped_redis_and_a_host_that_joins_are_seen(tmp_path):
    run, second = tmp_path / "first", tmp_path / "second"
    write_model(tmp_path / "model")
    (tmp_path / "small.yaml").write_text(SMALL)
    assert rubato("keys", "new", "--run", run, cwd=tmp_path).code == 0
    keys = (f"model.path={tmp_path / 'model'}", "run.steps=100000", "bus.host=127.0.0.1", "host.listen=127.0.0.1:0")
    with started(tmp_path / "first.log", "launch", "small.yaml", *keys, "--run-dir", run) as launcher:
        url = until(lambda: url_of(run, "node-1"), "the first host's endpoint")
        until(lambda: get(f"{url}/healthz/ready")[0] == 200, "readiness")
        until(lambda: figure(url, "rubato_step"), "a step")
        assert get(f"{url}/healthz/live") == (200, "live\n")
        assert get(f"{url}/")[0] == 404

        os.kill(pid_of(run, "env_manager-1"), signal.SIGKILL)
        until(lambda: figure(url, "rubato_actor_up", actor="env_manager-1") == 0.0, "the killed manager's fall")
        until(lambda: figure(url, "rubato_actor_up", actor="env_manager-1") == 1.0, "its return")
        assert figure(url, "rubato_actor_restarts_total", actor="env_manager-1", role="env_manager") == 1.0

        redis = redis_of(launcher.pid)
        redis.suspend()
        until(lambda: figure(url, "rubato_redis_up") == 0.0, "the stopped Redis")
        assert get(f"{url}/healthz/ready") == (503, "the run's Store does not answer\n")
        assert get(f"{url}/healthz/live")[0] == 200
        redis.resume()
        until(lambda: figure(url, "rubato_redis_up") == 1.0, "Redis' return")

        token = rubato("keys", "join-token", "--run", run, cwd=tmp_path).out
        join = ("add", "env_manager", "host.listen=127.0.0.1:0", "--join", "-", "--run-dir", second)
        with started(tmp_path / "second.log", *join, stdin=token, token=TOKEN) as joiner:
            there = until(lambda: url_of(second, "node-2"), "the joined host's endpoint")
            until(lambda: get(f"{there}/healthz/ready", TOKEN)[0] == 200, "its readiness")
            assert get(f"{there}/metrics")[0] == 401
            assert figure(there, "rubato_actor_up", TOKEN, actor="env_manager-2", host="node-2") == 1.0
            assert figure(there, "rubato_actor_up", TOKEN, actor="trainer-1") is None
            until(lambda: figure(url, "rubato_actor_up", actor="env_manager-2", host="node-2") == 1.0, "its actor on the first host")
            until(lambda: figure(url, "rubato_host_up", host="node-2") == 1.0, "the joined host on the first")
            os.kill(pid_of(second, "env_manager-2"), signal.SIGKILL)
            until(lambda: figure(url, "rubato_actor_restarts_total", actor="env_manager-2", host="node-2") == 1.0, "its restart")
            assert rubato("stop", "--run", run, cwd=tmp_path).code == 0
            assert (launcher.wait(LIMIT_S), joiner.wait(LIMIT_S)) == (130, 130)

    assert get(f"{url}/metrics") == get(f"{there}/metrics") == (0, "")
    assert not left_behind(run)
    assert not left_behind(second)
    said = (tmp_path / "first.log").read_text() + (tmp_path / "second.log").read_text()
    assert "Traceback" not in said
    assert TOKEN not in said


def test_an_address_that_is_taken_is_one_sentence(tmp_path):
    (tmp_path / "small.yaml").write_text(SMALL)
    write_model(tmp_path / "model")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        listen = f"host.listen=127.0.0.1:{taken.getsockname()[1]}"
        told = rubato("launch", "small.yaml", f"model.path={tmp_path / 'model'}", listen, "--run-dir", tmp_path / "run", cwd=tmp_path)

    assert told.code == 2
    assert told.err.splitlines()[-1] == f"can't listen at {listen}: Address already in use. Give another address or port."
    assert not left_behind(tmp_path)


def pid_of(run: Path, actor: str) -> int:
    lines = (run / "logs").glob("node-*.jsonl")
    events = [json.loads(line) for log in lines for line in log.read_text().splitlines()]
    return [event["pid"] for event in events if event.get("event") == "started" and event.get("actor") == actor][-1]


def redis_of(launcher: int) -> psutil.Process:
    children = psutil.Process(launcher).children(recursive=True)
    return next(child for child in children if re.search("redis-server|valkey-server", " ".join(child.cmdline()[:1]) + child.name()))
