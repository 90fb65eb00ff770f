"""The bench of weights between pods starts, over six hosts of its own."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tools.bench.short import NO_RESULT

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_a_version_crosses_once_between_two_pods_of_hosts_that_say_where_they_are(tmp_path):
    command = [sys.executable, str(ROOT / "tools" / "bench" / "pods.py"), "--short", "--only", "pods", "--json"]

    ended = subprocess.run(
        [*command, "--run-dir", str(tmp_path / "run")], cwd=ROOT, capture_output=True, text=True, timeout=280, check=False
    )

    if ended.stderr.startswith("no test-bed: "):
        pytest.skip(ended.stderr)
    assert ended.returncode == 0, ended.stderr[-3000:]
    found = json.loads(ended.stdout)
    assert found["note"] == NO_RESULT
    assert found["pods"]["versions"] >= 1
    assert 1.0 <= found["pods"]["copies_between_pods"] < 2.0
