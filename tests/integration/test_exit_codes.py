"""Each exit code, from a command as a user gives it; docs/running.md has the table."""

import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rubato.runtime.errors import ExitCode
from tests.jobs import ACTING, SMALL, clean_environment, rubato, write_model

ROOT = Path(__file__).parent.parent.parent
IDLE = '{run: {name: idle}, actors: {sample_buffer: {class: "rubato.actors.samples.buffer:SampleBuffer"}}, report: {finish: ""}}'
RAISES = "class Env:\n    def reset(self, *, seed):\n        raise KeyError('goal')\n"


@pytest.fixture
def place(tmp_path: Path) -> Path:
    for name, text in {"small.yaml": SMALL, "acting.yaml": ACTING, "idle.yaml": IDLE, "env.py": RAISES}.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def idle(place: Path) -> subprocess.Popen[str]:
    """A job that runs until it is stopped; returns when its actors are ready."""
    job = subprocess.Popen(
        [sys.executable, "-m", "rubato.runtime.cli", "launch", "idle.yaml", "--run-dir", "run"],
        cwd=place, env=clean_environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    assert job.stdout is not None
    while (line := job.stdout.readline()) and "actors" not in line:
        pass
    return job


def test_a_job_that_reached_its_end_is_done(place):
    write_model(place / "model")

    ended = rubato("launch", "small.yaml", f"model.path={place}/model", "run.steps=1", "--run-dir", "run", cwd=place)

    assert ended.code == ExitCode.DONE, ended.err


@pytest.mark.slow
def test_a_job_that_can_not_go_on_has_failed(place):
    write_model(place / "model")
    overrides = (f"model.path={place}/model", "env.isolation=auto", "env.class=env.py:Env", "env.workers=1")

    assert rubato("launch", "acting.yaml", "--run-dir", "run", *overrides, cwd=place).code == ExitCode.FAILED


EVEN_LOSS = "def fn(now_N, *rest, **clips):\n    return now_N * float('nan')\n"
UNEVEN = """
import random

class Env:
    def reset(self, *, seed):
        return "go", {}
    def step(self, action):
        return "go", random.random(), False, False, {}
    def close(self): ...
"""


@pytest.mark.slow
def test_a_job_that_changes_no_weight_has_failed_and_goes_on_once_its_cause_is_mended(place):
    write_model(place / "model")
    (place / "loss.py").write_text(EVEN_LOSS)
    (place / "env.py").write_text(UNEVEN)
    overrides = (f"model.path={place}/model", "train.kind=torch", "env.class=env.py:Env", "train.loss=loss.py:fn", "run.steps=40")

    ended = rubato("launch", "small.yaml", *overrides, "run.max_idle_steps=5", "--run-dir", "run", cwd=place)
    resumed = rubato("launch", "--resume", "run", "train.loss=grpo", "run.steps=8", cwd=place)
    rows = [json.loads(line) for line in (place / "run" / "metrics.jsonl").read_text().splitlines()]

    assert ended.code == ExitCode.FAILED
    assert ended.err.splitlines()[-1].startswith("nothing was learned: no weight has changed in 5 steps in a row.")
    assert " ! no weight has changed in 3 steps: every optimiser step was left out" in ended.out
    assert resumed.code == ExitCode.DONE, resumed.err
    learned = [row["optim/updates"] > 0 for row in rows]
    assert learned in ([False] * 5 + [True] * 3, [False] * 4 + [True] * 4)  # the checkpoint of the step that failed it may not be whole


BROKEN = """
from rubato.runtime.actor import Actor

class Broken(Actor):
    role = "broken"

    async def on_start(self):
        {raises}
"""

PERMANENT = {
    "open('/no/such/model.bin')": "FileNotFoundError: [Errno 2] No such file or directory: '/no/such/model.bin'",
    "import rubato_missing": "ModuleNotFoundError: No module named 'rubato_missing'",
    "raise ValueError('a vocabulary of 0')": "ValueError: a vocabulary of 0",
}


@pytest.mark.slow
@pytest.mark.parametrize("raises", PERMANENT)
def test_an_actor_that_can_never_start_ends_the_job_at_once(raises, place):
    (place / "broken.py").write_text(BROKEN.format(raises=raises))

    ended = rubato("launch", "idle.yaml", "actors.broken={class: 'broken.py:Broken'}", "--run-dir", "run", cwd=place)

    log = f"{place}/run/logs/broken-1.jsonl"
    assert ended.code == ExitCode.FAILED
    assert ended.err == f"broken-1 can't start (exit 2): broken-1: {PERMANENT[raises]}. Log: {log}\n"
    entries = [json.loads(line) for line in (place / "run" / "logs" / "node-1.jsonl").read_text().splitlines()]
    assert [e["event"] for e in entries if e["actor"] == "broken-1"] == ["started", "died"]
    assert "restarting" not in ended.out


ENGINES = {
    "class Engine:\n    def __init__(self, *given):\n        raise RuntimeError('no such kernel')": (
        "mine.py:Engine raised in its constructor: RuntimeError: no such kernel"
    ),
    "from rubato.actors.engines.engine import EngineError\n\nclass Engine:\n    def __init__(self, *given): pass\n\n    async def start(self):\n"
    "        raise EngineError('this model has 3 dimensions, and 2 are built in')": "this model has 3 dimensions, and 2 are built in",
}


@pytest.mark.slow
@pytest.mark.parametrize("code", ENGINES)
def test_an_engine_that_its_next_start_would_not_get_ready_either_is_not_started_again(code, place):
    (place / "mine.py").write_text(code)
    roles = ("actors.engine={class: 'rubato.actors.engines.worker:EngineWorker'}", "engine.kind=mine.py:Engine")

    ended = rubato("launch", "idle.yaml", *roles, "--run-dir", "run", cwd=place)

    assert ended.code == ExitCode.FAILED
    assert ended.err.startswith("engine-1 can't start (exit 2): engine-1: ")
    assert ENGINES[code] in ended.err
    assert "restarting" not in ended.out


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments", [("launch", "gone.yaml"), ("nosuch",), (), ("stop", "--run", "gone"), ("launch", "small.yaml", "--nosuch")]
)
def test_a_mistake_is_refused(arguments, place):
    assert rubato(*arguments, cwd=place).code == ExitCode.REFUSED


@pytest.mark.slow
def test_a_claim_that_does_not_come_out_is_a_surprise(place):
    scenario = (ROOT / "configs" / "sim" / "modelsync.yaml", "tcp.seconds=60", "--no-plots", "--out", "out")

    assert rubato("sim", *scenario, cwd=place).code == ExitCode.SURPRISED


@pytest.mark.slow
@pytest.mark.parametrize("how", ["signal", "stop"])
def test_a_job_that_was_stopped_was_interrupted(how, place):
    job = idle(place)
    if how == "signal":
        job.send_signal(signal.SIGINT)
    else:
        assert rubato("stop", "--run", "run", cwd=place).code == ExitCode.DONE
    job.communicate()

    assert job.returncode == ExitCode.INTERRUPTED


def test_the_table_of_exit_codes_is_whole():
    table = dict(re.findall(r"^\| (\d+) \| `(\w+)` \|", (ROOT / "docs" / "running.md").read_text(), re.M))

    assert table == {str(code.value): code.name for code in ExitCode}
