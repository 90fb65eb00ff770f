"""Distributions of their own beside ours: installed where nothing else is, each plug-in is found by its import path alone."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.jobs import SMALL

ROOT = Path(__file__).resolve().parents[2]
DISTRIBUTIONS = ("plugins/ocs", "examples/plugins")

SEAMS = {
    "launch.backend": "rubato_plugins.placer:Prefixed",
    "samples.policy": "rubato_plugins.policy:Mastered",
    "fabric.driver": "rubato_ocs.polatis:driver",
}
"""Key of the config → what of these distributions it may name."""

MOST_LINES = 60


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """A folder with what pip installed of them, built from copies: a build writes beside its sources."""
    place = tmp_path_factory.mktemp("installed")
    for name in DISTRIBUTIONS:
        copy = shutil.copytree(ROOT / name, place / "sources" / name)
        command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--no-build-isolation"]
        subprocess.run([*command, "--target", place / "site", copy], check=True, timeout=120)
    return place / "site"


def python(installed: Path, *arguments: object, cwd: Path) -> "subprocess.CompletedProcess[str]":
    """In a folder that has none of our sources; ours are imported as they are installed."""
    path = os.pathsep.join((str(installed), str(ROOT)))
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=cwd, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


def test_each_plug_in_is_imported_from_where_it_was_installed(installed, tmp_path):
    script = (
        "import sys; from runtime.importer import load_configured\n"
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
        installed,
        "-m",
        "runtime.cli",
        "launch",
        "small.yaml",
        "--dry-run",
        "model.path=/none",
        *hosts,
        named,
        cwd=tmp_path,
    )

    assert named.partition("=")[2] in ended.stdout
    assert "launch.backend" not in ended.stderr


def test_a_plug_in_of_the_example_fits_a_screen():
    lines = {path.name: len(path.read_text().splitlines()) for path in (ROOT / "examples/plugins").rglob("*.py")}

    assert len(lines) > len([key for key in SEAMS if key != "fabric.driver"])
    assert max(lines.values()) <= MOST_LINES, lines
