"""An actor of the user's own, as docs/actors.md builds it: it trains, and what is edited while it runs changes nothing in the run."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.jobs import clean_environment, left_behind, python, rubato, write_model

pytestmark = pytest.mark.slow

EXAMPLE = Path(__file__).parent.parent.parent / "examples" / "grader"
SMALL = ("prepare=[]", "engine={kind: scripted, scripted: {token_s: 0.0}}", "check.enabled=false", "train.batch_groups=2",
         "train.group_size=2", "env.concurrency=8", "report.finish=''")  # fmt: skip
PATIENCE_S = 60.0


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "model")


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    """The user's copy of the example."""
    return Path(shutil.copytree(EXAMPLE, tmp_path / "mine", ignore=shutil.ignore_patterns("__pycache__")))


@pytest.fixture
def running(mine: Path, model: Path) -> Iterator[Path]:
    """The user's folder, in which a job goes on until it is stopped."""
    command = [sys.executable, "-m", "rubato.runtime.cli", "launch", "job.yaml", "--run-dir", "run", "run.steps=100000"]
    with (mine / "out").open("wb") as out:
        job = subprocess.Popen([*command, f"model.path={model}", *SMALL], cwd=mine, env=clean_environment(), stdout=out, stderr=out)
    try:
        eventually(lambda: job.poll() is not None or len(rows(mine / "run")) > 1)
        assert job.poll() is None, (mine / "out").read_text()
        yield mine
    finally:
        job.send_signal(signal.SIGINT)
        try:
            job.wait(30)
        except subprocess.TimeoutExpired:
            job.kill()
            job.wait()


def rows(run: Path) -> list[dict[str, float]]:
    try:
        return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    except OSError:
        return []


def eventually(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S  # noqa: TID251 - of the test itself
    while not holds():
        assert time.monotonic() < deadline, f"not within {PATIENCE_S:.0f} s"  # noqa: TID251
        time.sleep(0.2)  # noqa: TID251


def shown(run: Path) -> dict[str, dict]:
    """The live actors by name."""
    told = json.loads(rubato("monitor", run, "--json", cwd=run).out)
    return {actor["name"]: actor for actor in told["actors"]}


def graded(run: Path) -> float:
    return sum(actor["metrics"].get("grader/graded", 0.0) for name, actor in shown(run).items() if "grader" in name)


def test_the_example_trains_and_its_own_test_passes(mine, model):
    ended = rubato("launch", "job.yaml", "--run-dir", "run", "run.steps=2", f"model.path={model}", *SMALL, cwd=mine)
    tested = python("-m", "pytest", "-q", "-p", "no:cacheprovider", "test_grader.py", cwd=mine)

    assert ended.code == 0, ended.err + ended.out
    assert [row["step"] for row in rows(mine / "run")] == [1, 2]
    assert all(row["rollout/turns_mean"] == 1.0 for row in rows(mine / "run"))
    assert tested.code == 0, tested.out
    assert left_behind(mine / "run") == []


def test_an_edit_of_the_users_files_changes_nothing_in_a_running_job(running):
    run = running / "run"
    for name in ("messages.py", "grader.py"):
        text = (running / name).read_text()
        (running / name).write_text(text.replace("    answer: str", "    answer: str\n    language: str") + "\nbroken(\n")
    before = shown(run)
    for name in ("grader-1", "grader-2"):
        os.kill(before[name]["pid"], signal.SIGKILL)
    eventually(
        lambda: all(shown(run).get(name, before[name])["incarnation"] > before[name]["incarnation"] for name in ("grader-1", "grader-2"))
    )
    done = len(rows(run))
    eventually(lambda: len(rows(run)) > done + 2 and graded(run) > 0)
    why = rubato("monitor", run, "--why", cwd=run)
    added = rubato("add", "grader", "--run", run, cwd=run)
    drained = rubato("drain", "grader-3", "--run", run, cwd=run)
    stopped = rubato("stop", "--run", run, cwd=run)

    assert "other message types" not in (running / "out").read_text()
    assert "-1.0 s" not in why.out
    assert (added.out, drained.out) == ("added: grader-3\n", "drained: grader-3\n")
    assert stopped.out.startswith("stopped in ")


@pytest.mark.nightly
def test_a_stopped_run_goes_on_from_another_folder_under_the_code_it_began_with(running, tmp_path):
    run, elsewhere = running / "run", tmp_path / "elsewhere"
    elsewhere.mkdir()
    launcher = json.loads((run / "run.json").read_text())["launcher_pid"]
    os.kill(launcher, signal.SIGINT)
    eventually(lambda: "Go on with: " in (running / "out").read_text() and not Path(f"/proc/{launcher}/cmdline").read_bytes())
    again = shlex.split(re.findall(r"Go on with: rubato (.*)", (running / "out").read_text())[-1])
    steps = int(rows(run)[-1]["step"])
    (running / "graded_env.py").write_text("broken(\n")

    resumed = rubato(*again, f"run.steps={steps + 2}", cwd=elsewhere)
    broken = rubato(*again, f"run.steps={steps + 4}", "--update-code", cwd=elsewhere)
    (running / "graded_env.py").write_text((EXAMPLE / "graded_env.py").read_text())
    mended = rubato(*again, f"run.steps={steps + 4}", "--update-code", cwd=elsewhere)

    assert resumed.code == 0, resumed.err + resumed.out
    assert f"{running / 'graded_env.py'} has changed since the run began" in resumed.out
    assert broken.code == 2
    assert f"{running / 'graded_env.py'}" in broken.err
    assert mended.code == 0, mended.err + mended.out
    assert int(rows(run)[-1]["step"]) == steps + 4
