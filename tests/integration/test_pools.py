"""Pools over real processes and a host that joins: GPUs, cores, environment and config of each, in the process and on the monitor."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rubato.runtime.monitor.app import RunActions
from rubato.runtime.monitor.views import ActorView
from tests.jobs import clean_environment, left_behind, rubato

pytestmark = pytest.mark.slow

LIMIT_S = 90.0

ACTOR = """
import os
from rubato.runtime.actor import Actor
from rubato.runtime.config import ActorConfig, Section


class SpeedSection(Section):
    slots: int = 8


class Worker(Actor):
    role = "worker"

    class Config(ActorConfig):
        speed: SpeedSection = SpeedSection()

    async def on_start(self):
        env = {name: os.environ.get(name, "") for name in ("CUDA_VISIBLE_DEVICES", "MINE", "OMP_NUM_THREADS")}
        self.log.info("has", slots=self.config.speed.slots, cores=sorted(os.sched_getaffinity(0)), **env)
"""

JOB = """
actors:
  worker:
    class: "worker.py:Worker"
    pools:
      decode: {count: 2, hardware: h20, gpus: 1, cores: 1, env: {MINE: 5, OMP_NUM_THREADS: 3}, set: {speed.slots: 64}}
      light: {count: 1, set: {speed.slots: 2}}
      far: {count: 0, labels: [b], gpus: 2}
state: {}
report: {finish: ""}
"""


@pytest.fixture
def place(tmp_path) -> Path:
    (tmp_path / "worker.py").write_text(ACTOR)
    (tmp_path / "job.yaml").write_text(JOB)
    return tmp_path


def until(condition, what: str):
    """What `condition` returns once it is true; the processes under test can only be watched from outside."""
    deadline = time.perf_counter() + LIMIT_S
    while not (found := condition()):
        assert time.perf_counter() < deadline, f"{what} did not happen within {LIMIT_S} s"
        time.sleep(0.1)  # noqa: TID251 - another process's progress can't be awaited
    return found


@contextmanager
def started(log: Path, *arguments: object, gpus: str) -> Iterator["subprocess.Popen[bytes]"]:
    """`rubato ARGUMENTS…` on a host that has these GPUs, while the block runs; what it says is in `log`."""
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "rubato.runtime.cli", *map(str, arguments)],
            cwd=log.parent, env={**clean_environment(), "CUDA_VISIBLE_DEVICES": gpus},
            stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True,
        )  # fmt: skip
    try:
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
        process.wait()


def has(run: Path, actor: str) -> list[dict]:
    """What the actor had in each of its lives."""
    try:
        lines = [json.loads(line) for line in (run / "logs" / f"{actor}.jsonl").read_text().splitlines()]
    except OSError:
        return []
    return [line for line in lines if line["event"] == "has"]


def shown(run: Path) -> dict[str, tuple[str, str, str]]:
    told = rubato("monitor", run, "--json", cwd=run)
    actors = json.loads(told.out)["actors"] if told.code == 0 else []
    return {a["name"]: (a["pool"], a["hardware"], a["host"]) for a in actors if a["role"] == "worker"}


@pytest.mark.nightly
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="pins two processes to a core each")
@pytest.mark.timeout(300)
def test_pools_on_two_hosts_have_what_the_config_gives_them(place):
    run, second, here = place / "run", place / "second", socket.gethostname()
    first_core, second_core = sorted(os.sched_getaffinity(0))[:2]
    assert rubato("keys", "new", "--run", run, cwd=place).code == 0
    with started(place / "first.log", "launch", "job.yaml", "bus.host=127.0.0.1", "--run-dir", run, gpus="4,5,6") as launcher:
        until(lambda: len(shown(run)) == 3, "the launch")
        others = {"MINE": "", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "4,5,6"}
        of_decode = {"slots": 64, "MINE": "5", "OMP_NUM_THREADS": "3"}
        assert has(run, "worker-1")[0].items() >= {**of_decode, "CUDA_VISIBLE_DEVICES": "4"}.items()
        assert has(run, "worker-2")[0].items() >= {**of_decode, "CUDA_VISIBLE_DEVICES": "5"}.items()
        assert has(run, "worker-3")[0].items() >= {**others, "slots": 2}.items()
        assert [has(run, f"worker-{n}")[0]["cores"] for n in (1, 2)] == [[first_core], [second_core]]
        assert len(has(run, "worker-3")[0]["cores"]) == len(os.sched_getaffinity(0))

        full = rubato("add", "worker", "--pool", "decode", "-n", "2", "--run", run, cwd=place)
        wrong = rubato("add", "worker", "--pool", "far", "--run", run, cwd=place)
        light = asyncio.run(RunActions(run).act("add", view(run, "worker-3")))  # as `+` in the live view does
        token = rubato("keys", "join-token", "--run", run, cwd=place).out.strip()
        join = ("add", "worker", "--pool", "far", "--join", token, "--run-dir", second)
        with started(place / "unlabelled.log", *join, gpus="0,1") as unlabelled:
            refused = unlabelled.wait(LIMIT_S)
        with started(place / "second.log", *join, "host.labels=[a, b]", gpus="0,1"):
            until(lambda: "worker-5" in shown(run), "the second host")
            seen, table = shown(run), rubato("monitor", run, "--once", cwd=place).out
            os.kill(view(run, "worker-2")["pid"], signal.SIGKILL)
            until(lambda: len(has(run, "worker-2")) == 2, "its second life")
            drained = rubato("drain", "--pool", "far", "--run", run, cwd=place)
            both = rubato("drain", "--pool", "decode", "worker-3", "--run", run, cwd=place)
            more = rubato("add", "worker", "--pool", "decode", "--run", run, cwd=place)
            until(lambda: has(run, "worker-5"), "one more, under a name that is free again")
            assert rubato("stop", "--run", run, cwd=place).code == 0
            assert launcher.wait(LIMIT_S) == 130

    assert full.err.startswith("can't add 2 worker to the pool decode: this host has 0 of 2 cores free") or (
        full.err == "can't add 2 worker to the pool decode, only 1: this host has 0 of 3 GPUs free, and each process takes 1.\n"
    )
    assert wrong.err == "can't add 1 worker to the pool far: this host does not have the label b.\n"
    assert light == "worker-4 added"
    assert (refused, (place / "unlabelled.log").read_text()) == (2, wrong.err)
    assert has(second, "worker-5")[0]["CUDA_VISIBLE_DEVICES"] == "0,1"
    assert seen == {
        **dict.fromkeys(("worker-1", "worker-2"), ("decode", "h20", here)),
        **dict.fromkeys(("worker-3", "worker-4"), ("light", "", here)),
        "worker-5": ("far", "", here),
    }
    assert "pools    decode h20 2/2, far 1/1, light 2/2" in table
    assert has(run, "worker-2")[1].items() >= {"CUDA_VISIBLE_DEVICES": "5", "cores": [second_core]}.items()
    assert (drained.out, both.out) == ("drained: worker-5\n", "drained: worker-3, worker-1, worker-2\n")
    assert more.out == "added: worker-5\n"
    assert has(run, "worker-5")[0].items() >= {"CUDA_VISIBLE_DEVICES": "4", "cores": [first_core]}.items()
    assert not left_behind(place)


def view(run: Path, name: str) -> ActorView:
    """The actor as the monitor shows it."""
    told = rubato("monitor", run, "--json", cwd=run)
    return next(actor for actor in json.loads(told.out)["actors"] if actor["name"] == name)


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("light.labels=[b]", "light.count is 1, but this host does not have the label b. Set it to 0, and let other"),
        ("decode.cores=4096", "decode.count is 2, but this host has "),
        ("spare.count=1", ""),
        ("light.hardwar=h20", "light.hardwar is not a key. Did you mean actors.worker.pools.light.hardware?"),
    ],
)
def test_a_launch_says_what_of_a_pool_this_host_can_not_have(place, override, sentence, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    told = rubato("launch", "job.yaml", "--dry-run", f"actors.worker.pools.{override}", cwd=place)

    assert (told.code, len(told.err.splitlines())) == ((2, 1) if sentence else (0, 0)), told.err
    assert sentence in told.err
