"""A run that is stopped and killed at random points and resumed trains on exactly what an undisturbed one does.

Under α = 0 the batch of a step is decided by the seed alone, so the two runs can be compared sample by sample.
"""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.jobs import LEARNING, clean_environment, left_behind, rubato, write_model

pytestmark = pytest.mark.slow

STEPS = 40
LIMIT_S = 90.0


def trained(run: Path) -> list[tuple[str, int, str, float]]:
    """(trajectory, step, fate, reward) of every trained sample."""
    lines = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    return sorted((x["trajectory_id"], x["step"], x["fate"], x["reward"]) for x in lines if x["step"] is not None)


def rows(run: Path) -> int:
    path = run / "metrics.jsonl"
    return path.read_text().count("\n") if path.exists() else 0


@pytest.fixture
def place(tmp_path: Path) -> Path:
    write_model(tmp_path / "model")
    (tmp_path / "small.yaml").write_text(LEARNING)
    return tmp_path


def command(place: Path, run: Path) -> list[str]:
    overrides = [f"model.path={place / 'model'}", f"run.steps={STEPS}", "staleness.alpha=0", "checkpoint.every=5"]
    return ["launch", "small.yaml", *overrides, "--run-dir", str(run)]


def end_at(place: Path, run: Path, step: int, number: signal.Signals, *more: str) -> None:
    """Launch, and send the launcher `number` once `step` has its row."""
    launcher = subprocess.Popen(
        [sys.executable, "-m", "rubato.runtime.cli", *command(place, run), *more],
        cwd=place,
        env=clean_environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    deadline = time.perf_counter() + LIMIT_S
    while rows(run) < step:
        assert launcher.poll() is None, f"the launcher ended with {launcher.returncode}"
        assert time.perf_counter() < deadline, f"step {step} had no row within {LIMIT_S} s"
        time.sleep(0.02)  # noqa: TID251 - another process's progress can't be awaited
    launcher.send_signal(number)
    launcher.wait(LIMIT_S)


@pytest.mark.timeout(400)  # seven processes start four times on two cores
def test_a_run_that_was_killed_and_stopped_trains_on_what_an_undisturbed_one_does(place):
    rng = random.Random(os.environ.get("RUBATO_SEED", "1"))
    whole, broken = place / "whole", place / "broken"
    assert rubato(*command(place, whole), cwd=place).code == 0

    end_at(place, broken, rng.randint(2, STEPS // 2), signal.SIGKILL)
    end_at(place, broken, rng.randint(STEPS // 2, STEPS - 8), signal.SIGTERM, "--resume")
    resumed = rubato(*command(place, broken), "--resume", cwd=place)

    assert resumed.code == 0, resumed.err
    assert rows(broken) == STEPS
    assert trained(broken) == trained(whole)
    assert len(trained(whole)) == STEPS * 4
    assert not left_behind(broken)
