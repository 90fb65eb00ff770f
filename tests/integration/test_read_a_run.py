"""A real run of the quickstart, read as a user reads it: each metric is described, texts and figures are there."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from rubato.actors.report.metrics import METRICS, described

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
SMALL = ("run.steps=2", "eval.every=1", "eval.num_tasks=4", "eval.final_num_tasks=4", "train.batch_groups=4")


def rubato(*arguments):
    command = [sys.executable, "-m", "rubato.runtime.cli", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=150, check=True).stdout


def test_each_metric_of_a_run_is_described_and_its_texts_and_figures_can_be_read(tmp_path):
    run = tmp_path / "run"
    rubato("launch", "configs/quickstart.yaml", *SMALL, "--run-dir", run)

    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    names = {name for row in rows for name in row}
    assert sorted(name for name in names if described(name) is None) == []
    always = [m.name for section in METRICS.values() for m in section if not m.absent and "<" not in m.name]
    assert [name for name in always if any(name not in row for row in rows)] == []

    samples = [json.loads(line) for line in rubato("samples", run, "--json").splitlines()]
    assert {sample["fate"] for sample in samples} <= {"trained", "zero_spread", "unused", "stale"}
    assert all(sample["turns"][0]["prompt"] and sample["scores"].keys() >= {"env"} for sample in samples)
    held_out = [json.loads(line) for line in rubato("samples", run, "--json", "--purpose", "eval").splitlines()]
    assert {sample["step"] for sample in held_out} >= {2}

    (setting,) = json.loads(rubato("compare", run, "--json"))["settings"]
    assert setting["runs"][0]["steps"] == 2
