"""tools/bench/rollout.py: both arms live, from the command to the JSON."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.jobs import left_behind, write_model
from tools.bench import rollout

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.nightly
def test_both_arms_play_and_the_tail_has_a_name_of_its_own(tmp_path):
    file, plot = tmp_path / "found.json", tmp_path / "plot.png"
    command = [sys.executable, ROOT / "tools/bench/rollout.py", "--sigma", 1, "--mu", 0.02, "--batches", 1]
    command += ["--json", file, "--plot", plot]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=170, cwd=ROOT, check=False)

    assert done.returncode == 0, done.stderr
    found = json.loads(file.read_text())
    (point,) = found["points"]
    assert point["sigma_over_mu"] == 1.0
    for measured in (point, found["pareto"]):
        assert measured["speedup"] == pytest.approx(measured["batch_s"] / measured["trajectory_s"])
        assert measured["ideal_speedup"] > 1
    assert "sigma_over_mu" not in found["pareto"]
    assert plot.stat().st_size > 1000
    assert not left_behind(tmp_path)


@pytest.mark.slow
def test_a_job_that_fails_is_told_with_its_last_words_and_the_other_is_ended(tmp_path):
    model = write_model(tmp_path / "model")
    endless, broken = (rollout.config("trajectory", 0.1, mu_s=1.0, batches=1000, model=model) for _ in range(2))
    broken["run"] = {"name": "broken", "stepps": 1}

    with pytest.raises(RuntimeError, match=r"broken ended with 2: (.|\n)*stepps"):
        rollout.play([(broken, tmp_path / "broken"), (endless, tmp_path / "endless")], 100.0)

    assert not left_behind(tmp_path)
