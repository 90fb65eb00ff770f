"""Distributions of their own beside ours: installed where nothing else is, each plug-in is found by its import path alone."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.jobs import LEARNING, SMALL, left_behind, write_model

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
DISTRIBUTIONS = ("plugins/ocs", "examples/plugins")

SEAMS = {
    "proxy.picker": "rubato_plugins.picker:NewestWeights",
    "samples.policy": "rubato_plugins.policy:Mastered",
    "train.hooks": "rubato_plugins.hook:GradientGuard",
    "cluster.lease": "rubato_plugins.lease:HostTurns",
    "launch.backend": "rubato_plugins.placer:Prefixed",
    "fabric.driver": "rubato_ocs.polatis:driver",
}
"""Key of the config → what of these distributions it may name."""

LISTS = {"samples.policy": "[%s]", "train.hooks": "[%s]"}
"""Keys that take several."""

MOST_LINES = 60

LIMIT_S = 400.0

EASY = """
from itertools import count

class Easy:
    PLAYED = count()

    def reset(self, *, seed):
        self.reward = next(self.PLAYED) % 90 / 100 if seed % 3 else 1.0
        return "1 + 1 =", {}

    def step(self, action):
        return "", self.reward, True, False, {}

    def close(self): ...
"""
"""A third of its tasks is mastered by any policy."""

PREFIX = """#!/bin/sh
echo "$@" >> PLACED
exec "$@"
"""
"""What `ssh gpu-7` would be."""


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """A folder with what pip installed of them, built from copies: a build writes beside its sources."""
    place = tmp_path_factory.mktemp("installed")
    for name in DISTRIBUTIONS:
        copy = shutil.copytree(ROOT / name, place / "sources" / name)
        command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--no-build-isolation"]
        subprocess.run([*command, "--target", place / "site", copy], check=True, timeout=120)
    return place / "site"


def python(installed: Path, *arguments: object, cwd: Path, **env: str) -> "subprocess.CompletedProcess[str]":
    """In a folder that has none of our sources; ours are imported as they are installed."""
    path = os.pathsep.join((str(installed), str(ROOT)))
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=cwd, env={**os.environ, "PYTHONPATH": path, **env}, capture_output=True, text=True, timeout=LIMIT_S, check=False,
    )  # fmt: skip


def test_each_plug_in_is_imported_from_where_it_was_installed(installed, tmp_path):
    script = (
        "import sys; from rubato.runtime.importer import load_configured\n"
        "for target in sys.argv[1:]: print(sys.modules[load_configured(target).__module__].__file__)"
    )

    ended = python(installed, "-c", script, *SEAMS.values(), cwd=tmp_path)

    assert ended.returncode == 0, ended.stderr
    assert [Path(line).is_relative_to(installed) for line in ended.stdout.splitlines()] == [True] * len(SEAMS)


def test_a_config_that_names_them_is_taken(installed, tmp_path):
    (tmp_path / "small.yaml").write_text(SMALL)
    hosts = ("bus.host=127.0.0.1", "launch.hosts={more: {pools: {env_manager: 1}}}")
    named = f"launch.backend={SEAMS['launch.backend']}"

    ended = python(
        installed, "-m", "rubato.runtime.cli", "launch", "small.yaml", "--dry-run", "model.path=/none", *hosts, named, cwd=tmp_path
    )

    assert named.partition("=")[2] in ended.stdout
    assert "launch.backend" not in ended.stderr


@pytest.mark.timeout(500)  # a host of its own joins beside the first, on two cores
def test_a_job_with_one_of_each_seam_plays_with_all_of_them(installed, tmp_path):
    (tmp_path / "small.yaml").write_text(LEARNING)
    (tmp_path / "easy.py").write_text(EASY)
    (tmp_path / "prefix").write_text(PREFIX)
    (tmp_path / "prefix").chmod(0o755)
    run, model = tmp_path / "run", write_model(tmp_path / "model")
    named = [f"{key}={LISTS.get(key, '%s') % path}" for key, path in SEAMS.items() if key != "fabric.driver"]
    far = ("bus.host=127.0.0.1", "actors.env_manager.count=0", "launch.hosts={far: {pools: {env_manager: 1}}}")
    slow = ("run.steps=20", "engine.scripted.token_s=0.05")  # a row has what a proxy said in its last second
    job = (f"model.path={model}", "env.class=easy.py:Easy", *slow, *far, *named)

    ended = python(
        installed, "-m", "rubato.runtime.cli", "launch", "small.yaml", *job, "--run-dir", run,
        cwd=tmp_path, HOST_PREFIX=str(tmp_path / "prefix"), HOST_LOCK=str(tmp_path / "lock"),
    )  # fmt: skip

    assert ended.returncode == 0, ended.stderr
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    samples = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    assert rows[-1]["queue/newest/engines"] == 1.0  # the picker
    assert {sample["reward"] for sample in samples if sample["fate"] == "mastered"} == {1.0}  # the policy
    assert max(sample["reward"] for sample in samples if sample["fate"] == "trained") < 0.9
    assert rows[-1]["guard/grad_norm"] == max(row["optim/grad_norm"] for row in rows) > 0.0  # the hook
    assert min(row["turns/waited_s"] for row in rows) >= 0.0  # the lease: each step was trained under it
    assert (tmp_path / "lock").exists()
    placed = (tmp_path / "PLACED").read_text().splitlines()  # the placer: environments ran on its host alone
    assert len(placed) == 1
    assert "add host.name=far-1 --pools env_manager=1 --join -" in placed[0]
    assert not left_behind(run)


def test_a_plug_in_of_the_example_fits_a_screen():
    lines = {path.name: len(path.read_text().splitlines()) for path in (ROOT / "examples/plugins").rglob("*.py")}

    assert len(lines) > len([key for key in SEAMS if key != "fabric.driver"])
    assert max(lines.values()) <= MOST_LINES, lines
