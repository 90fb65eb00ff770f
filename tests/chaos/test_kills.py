"""kill -9 of each role and of the launcher in a real run: it goes on, it resumes, and the ledger adds up."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from tests.jobs import LEARNING, clean_environment, left_behind, rubato, write_model

pytestmark = pytest.mark.slow

ROLES = ["engine", "env_manager", "llm_proxy", "sample_buffer", "trainer"]
LIMIT_S = 60.0


def rows_of(run: Path) -> list[int]:
    lines = (run / "metrics.jsonl").read_text().splitlines() if (run / "metrics.jsonl").exists() else []
    return [json.loads(line)["step"] for line in lines]


def until(condition, what: str):
    """What `condition` returns once it is true; the processes under test can only be watched from outside."""
    deadline = time.perf_counter() + LIMIT_S
    while not (found := condition()):
        assert time.perf_counter() < deadline, f"{what} did not happen within {LIMIT_S} s"
        time.sleep(0.1)  # noqa: TID251 - another process's progress can't be awaited
    return found


def actors_of(run: Path) -> dict[str, dict]:
    told = rubato("monitor", run, "--json", cwd=run)
    return {a["name"]: a for a in json.loads(told.out)["actors"]} if told.code == 0 else {}


def pids_of(run: Path, module: str) -> list[int]:
    """Of processes that run `module` for the run."""
    found = subprocess.run(["pgrep", "-f", f"{module} {run}"], capture_output=True, text=True, check=False)
    return [int(pid) for pid in found.stdout.split()]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    write_model(tmp_path / "model")
    (tmp_path / "small.yaml").write_text(LEARNING)
    return tmp_path


def start(place: Path, run: Path) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-m", "rubato.runtime.cli", "launch", "small.yaml", f"model.path={place / 'model'}"]
    return subprocess.Popen(
        [*command, "run.steps=100000", "--run-dir", str(run)],
        cwd=place,
        env=clean_environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


@pytest.mark.timeout(400)  # seven processes start eleven times on two cores
def test_a_run_outlives_the_death_of_each_role_and_of_the_launcher(place):
    run, order = place / "run", random.Random(os.environ.get("RUBATO_SEED", "1")).sample(ROLES, len(ROLES))
    launcher = start(place, run)
    until(lambda: len(rows_of(run)) >= 2, "the second step")

    warm = until(lambda: pids_of(run, "rubato.runtime.launch.warm"), "the warm parent")
    lives = {name: actor["incarnation"] for name, actor in actors_of(run).items()}
    os.kill(warm[0], signal.SIGKILL)
    until(lambda: set(pids_of(run, "rubato.runtime.launch.warm")) - set(warm), "another warm parent")
    assert {name: actor["incarnation"] for name, actor in actors_of(run).items()} == lives
    for role in order:
        victim = actors_of(run)[f"{role}-1"]
        os.kill(victim["pid"], signal.SIGKILL)
        until(lambda v=victim: actors_of(run).get(v["name"], v)["incarnation"] > v["incarnation"], f"the restart of {role}")
        before = rows_of(run)[-1]
        until(lambda b=before: rows_of(run)[-1] > b + 1, f"progress after the death of {role}")
    launcher.kill()
    launcher.wait()
    until(lambda: not left_behind(run), "the end of every process of a killed launcher")
    last = rows_of(run)[-1]
    resumed = rubato("launch", "small.yaml", f"run.steps={last + 20}", "--run-dir", run, "--resume", cwd=place)

    assert resumed.code == 0, resumed.err
    assert rows_of(run) == list(range(1, last + 21))
    ledger = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    assert max(Counter(line["trajectory_id"] for line in ledger).values()) == 1
    assert all(line["age"] <= 1 for line in ledger if line["fate"] == "trained")
    assert {line["step"] for line in ledger if line["fate"] in ("trained", "zero_spread")} == set(range(1, last + 21))
    assert not left_behind(run)
