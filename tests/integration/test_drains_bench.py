"""tools/bench/drains.py: a run goes on after a kill and after a drain, and both have a figure."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.nightly
def test_kills_and_drains_of_a_role_have_a_figure_beside_what_a_run_does_by_itself(tmp_path):
    arguments = ["--times", "1", "--window", "1", "--roles", "env_manager", "--json", str(tmp_path / "found.json")]

    subprocess.run([sys.executable, ROOT / "tools/bench/drains.py", *arguments], check=True, timeout=150, cwd=ROOT)

    found = json.loads((tmp_path / "found.json").read_text())
    assert sorted(found) == ["env_manager", "nothing"]
    assert all(0.0 < pause < 60.0 for pauses in found.values() for pause in pauses.values())
