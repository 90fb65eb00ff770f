"""A run whose checkpoints are mirrored outlives its head: its folder is gone, and it goes on from the mirror, which may be a folder or S3."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.request import Request, urlopen

import pytest

from rubato.actors.checkpoints import checkpoint
from rubato.actors.checkpoints.mirror import Claim, Copy, Mirror, bring
from tests.jobs import LEARNING, SMALL, clean_environment, left_behind, rubato, write_model

pytestmark = pytest.mark.slow

LIMIT_S = 90.0

S3 = ("s3fs", "moto", "flask")
"""Packages for a local S3; they go beside other versions than ours, so that .ci/mirror has an environment of their own."""

SERVER = """
import sys, threading
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer("127.0.0.1", int(sys.argv[1]))
server.start()
print("ready", flush=True)
sys.stdin.read()
server.stop()
"""

TORN = """
import os, signal, sys
from pathlib import Path
from rubato.actors.checkpoints.mirror import Claim, Copy, Mirror
at, num = Mirror(sys.argv[1]), 0
def moved():
    global num
    num += 1
    if num == int(sys.argv[3]):
        os.kill(os.getpid(), signal.SIGKILL)
at.moved = moved
at.put(Copy(Claim(1, "aaaaaaaa"), 2), Path(sys.argv[2]), "line")
"""


@pytest.fixture(params=["folder", "s3"])
def url(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Of an empty mirror."""
    if request.param == "folder":
        yield str(tmp_path / "mirror")
        return
    for package in S3:
        pytest.importorskip(package, reason=f"needs {package}: see .ci/mirror")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    for name, value in {
        "AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "hunter2hunter2", "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    command = [sys.executable, "-c", SERVER, str(port)]
    server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    try:
        assert server.stdout is not None
        while b"ready" not in server.stdout.readline():
            assert server.poll() is None, "the local S3 did not start"
        urlopen(Request(f"http://127.0.0.1:{port}/bucket", method="PUT")).close()
        yield "s3://bucket/run"
    finally:
        server.kill()
        server.wait()
        server.stdin.close()
        server.stdout.close()


@pytest.fixture
def place(tmp_path: Path) -> Path:
    write_model(tmp_path / "model")
    (tmp_path / "small.yaml").write_text(SMALL)
    return tmp_path


def words(place: Path, run: Path, url: str, steps: int, *more: str) -> list[str]:
    return [
        "launch",
        "small.yaml",
        f"model.path={place / 'model'}",
        f"run.steps={steps}",
        f"checkpoint.mirror={url}",
        "--run-dir",
        str(run),
        *more,
    ]


def num_copied(run: Path) -> int:
    """The newest step that has a whole copy, by the newest row."""
    lines = (run / "metrics.jsonl").read_text().splitlines()
    row = json.loads(lines[-1]) if lines else {"step": 0, "checkpoint/mirror_behind": 0.0}
    return int(row["step"] - 1 - row["checkpoint/mirror_behind"])


def rows(run: Path) -> list[int]:
    path = run / "metrics.jsonl"
    return [json.loads(line)["step"] for line in path.read_text().splitlines()] if path.exists() else []


def killed_at(place: Path, run: Path, url: str, step: int) -> None:
    """Launch, and kill the launcher once `step` has its row, and some step its copy."""
    command = [sys.executable, "-m", "rubato.runtime.cli", *words(place, run, url, 100000)]
    launcher = subprocess.Popen(command, cwd=place, env=clean_environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.perf_counter() + LIMIT_S
    while len(rows(run)) < step or num_copied(run) < 2:
        assert launcher.poll() is None, f"the launcher ended with {launcher.returncode}"
        assert time.perf_counter() < deadline, f"step {step} had no row within {LIMIT_S} s"
        time.sleep(0.02)  # noqa: TID251 - another process's progress can't be awaited
    launcher.send_signal(signal.SIGKILL)
    launcher.wait(LIMIT_S)


@pytest.mark.timeout(300)
def test_a_run_whose_folder_is_gone_goes_on_gapless_from_its_mirror_under_a_later_term(place, url):
    first, second = place / "first", place / "second"
    killed_at(place, first, url, 8)
    log = (first / "logs" / "trainer-1.jsonl").read_text()
    before, steps = checkpoint.newest_term(first / "checkpoints"), len(rows(first)) + 3
    shutil.rmtree(first)

    resumed = rubato(*words(place, second, url, steps, "--resume"), cwd=place)

    assert resumed.code == 0, resumed.err
    assert "going on after step" in resumed.out
    assert rows(second) == list(range(1, steps + 1))
    samples = [json.loads(line) for line in (second / "samples.jsonl").read_text().splitlines()]
    trained = [x["trajectory_id"] for x in samples if x["fate"] == "trained"]
    assert len(trained) == len(set(trained))
    assert checkpoint.newest_term(second / "checkpoints") > before + 1
    assert "hunter2" not in log
    assert not left_behind(second)

    again = rubato(*words(place, place / "third", url, steps), cwd=place)
    assert again.code == 2
    assert f"holds checkpoints of another run, up to step {steps}" in again.err


@pytest.mark.parametrize("at", [1, 3, 7])
def test_an_upload_that_was_killed_in_the_middle_is_passed_over(url, tmp_path, at):
    for step, size in ((1, 10), (2, 20 << 20)):
        files = {"weights": os.urandom(size), "rest": b"1"}
        checkpoint.write(tmp_path / "checkpoints" / f"step_{step}", files, step=step, term=1)
    Mirror(url).put(Copy(Claim(1, "aaaaaaaa"), 1), tmp_path / "checkpoints" / "step_1", "line")

    command = [sys.executable, "-c", TORN, url, str(tmp_path / "checkpoints" / "step_2"), str(at)]
    ended = subprocess.run(command, env=clean_environment(), check=False)

    assert ended.returncode == -signal.SIGKILL
    (tmp_path / "new").mkdir()
    assert bring(url, tmp_path / "new").step == 1


@pytest.mark.timeout(300)
def test_training_goes_on_where_the_mirror_goes_away_and_the_user_is_told_once(place):
    mirror = place / "mounted" / "mirror"
    mirror.parent.mkdir()
    run = place / "run"
    assert rubato(*words(place, run, str(mirror), 3), cwd=place).code == 0
    shutil.rmtree(mirror)
    preload = place / "away.py"  # once the launch has looked, nothing can be written there
    preload.write_text(
        "from rubato.actors.training.hooks import StepHook\n"
        "import pathlib, shutil\n"
        "class Away(StepHook):\n"
        "    async def begin(self, step, rows):\n"
        f"        shutil.rmtree({str(mirror)!r}, ignore_errors=True)\n"
        f"        pathlib.Path({str(mirror)!r}).write_text('')\n"
    )

    ended = rubato("launch", "--resume", str(run), "run.steps=12", f"train.hooks=[{preload}:Away]", cwd=place)

    assert ended.code == 0, ended.err
    assert rows(run) == list(range(1, 13))
    assert ended.out.count("Training goes on") == 1
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["checkpoint/mirror_failures"] >= 1
    assert last["checkpoint/mirror_behind"] > 0


def test_a_full_mirror_is_told_as_one(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", disk], capture_output=True, check=False)
    if mounted.returncode:
        pytest.skip(f"no disk can be mounted here: {mounted.stderr.decode().strip()}")
    try:
        checkpoint.write(tmp_path / "checkpoints" / "step_1", {"weights": bytes(4 << 20)}, step=1, term=1)
        with pytest.raises(Exception, match="it is full"):
            Mirror(f"{disk}/mirror").put(Copy(Claim(1, "aaaaaaaa"), 1), tmp_path / "checkpoints" / "step_1", "line")
    finally:
        subprocess.run(["umount", "-l", disk], check=True)


def test_what_is_wrong_with_a_mirror_is_one_sentence_at_launch(place, url):
    wrong = {"rel/x": "neither a whole path", f"{place}/no/where/x": "there is no", "foo://x/y": "there is no foo://"}
    if url.startswith("s3://"):
        wrong["s3://nobucket/x"] = "bucket does not exist"
    elif not any(Path(folder, "s3fs").exists() for folder in sys.path):
        wrong["s3://bucket/x"] = "pip install 'rubato-rl[s3]'"
    for given, said in wrong.items():
        ended = rubato(*words(place, place / "run", given, 2), cwd=place)

        assert ended.code == 2, given
        assert said in ended.err
        assert len(ended.err.strip().splitlines()) == 1, ended.err
    nothing = rubato(*words(place, place / "run", url, 2, "--resume"), cwd=place)
    assert nothing.code == 2
    assert "holds no checkpoint to go on from" in nothing.err
    assert not (place / "run").exists()


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("base", "more", "holds"),
    [
        (SMALL, ["train.mesh.shard=2"], "scripted.json"),
        (LEARNING, ["train.lora.rank=4", "engine.kind=scripted"], "adapter_model.safetensors"),
    ],
    ids=["ranks", "adapter"],
)
def test_what_ranks_and_adapters_saved_comes_back_too(place, base, more, holds):
    (place / "small.yaml").write_text(base)
    mirror = str(place / "mirror")
    assert rubato(*words(place, place / "first", mirror, 3, *more), cwd=place).code == 0
    shutil.rmtree(place / "first")

    resumed = rubato(*words(place, place / "second", mirror, 5, *more, "--resume"), cwd=place)

    assert resumed.code == 0, resumed.err
    assert "going on after step 3" in resumed.out
    assert "in a row" not in resumed.out  # nothing was sampled in vain before the trainer was there
    assert rows(place / "second") == [1, 2, 3, 4, 5]
    assert any(Path(mirror).glob(f"step_5.*/{holds}"))
