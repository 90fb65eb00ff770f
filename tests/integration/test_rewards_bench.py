"""tools/bench/rewards.py: both arms run, and say who was busy."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.timeout(400)
def test_both_arms_have_their_rollout_time_and_the_share_that_the_four_slots_were_busy(tmp_path):
    file = tmp_path / "found.json"
    command = [sys.executable, ROOT / "tools/bench/rewards.py", "--steps", "1", "--json", file, "train.batch_groups=16"]
    done = subprocess.run(list(map(str, command)), check=False, timeout=390, cwd=ROOT, capture_output=True, text=True)
    assert file.exists(), done.stderr + done.stdout

    found = json.loads(file.read_text())

    assert found["dedicated"]["pool_mean"] == 4
    assert found["elastic"]["pool_most"] <= 8
    for arm in ("dedicated", "elastic"):
        assert found[arm]["scored"] == 16 * 8, "the whole batch, and nothing of the ones beside it"
        assert found[arm]["reward_busy_s"] >= 0.95 * 16 * 8 * 4 * 0.00417, "a paced call is never shorter; a slow host makes it longer"
        assert found[arm]["utilisation"] > 0
        assert found[arm]["rollout_s"] > 0
    assert found["speedup"] == pytest.approx(found["dedicated"]["rollout_s"] / found["elastic"]["rollout_s"])
