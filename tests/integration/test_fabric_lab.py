"""A real job over racks: ranks that add up their gradients over a link, engines that sample from weights that came over others."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.jobs import clean_environment, left_behind

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
WEIGHTS_MB = 2.0
"""Of one version. Links are read between two steps, while some bytes of either may be under way."""


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_a_job_trains_over_racks_whose_circuits_the_controller_changes(tmp_path):
    command = [sys.executable, str(ROOT / "tools" / "fabric_lab.py"), "configs/lab_racks.yaml", "--modes", "controller"]
    report, run = tmp_path / "lab.json", tmp_path / "run"

    ended = subprocess.run(
        [*command, "--repetitions", "1", "--steps", "2", "--json", report, "--run-dir", run],
        cwd=ROOT, env={**clean_environment(), "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=580, check=False,
    )  # fmt: skip

    if ended.stderr.startswith("no test-bed: "):
        pytest.skip(ended.stderr.strip())
    assert ended.returncode == 0, ended.stderr[-3000:]
    (found,) = json.loads(report.read_text())["runs"]["controller"]
    sent = found["sent_mb"]
    assert sent["rack-0 rack-1"] > WEIGHTS_MB / 2, "gradients from rank to rank"
    assert sent["rack-1 rack-0"] > WEIGHTS_MB / 2
    assert sent["rack-0 rack-2"] > WEIGHTS_MB / 4, "weights to each engine"
    assert sent["rack-0 rack-3"] > WEIGHTS_MB / 4
    assert sent["rack-1 rack-2"] + sent["rack-1 rack-3"] < WEIGHTS_MB / 4
    assert found["changes"] > 0
    assert 0 < found["reward"] <= 1
    logs = [log for rack in ("rack-2", "rack-3") for log in (run / "controller-1" / rack / "logs").glob("engine-*.jsonl")]
    assert len(logs) == 2
    assert not left_behind(tmp_path)
