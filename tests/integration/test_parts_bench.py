"""The bench of weights in parts starts, over three hosts of its own."""

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
def test_a_third_host_takes_versions_whose_bytes_the_trainers_host_sends_but_half(tmp_path):
    command = [sys.executable, str(ROOT / "tools" / "bench" / "parts.py"), "--short", "--json", "--run-dir", str(tmp_path / "run")]

    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)

    if ended.stderr.startswith("no test-bed: "):
        pytest.skip(ended.stderr)
    assert ended.returncode == 0, ended.stderr[-3000:]
    found = json.loads(ended.stdout)
    assert found["note"] == NO_RESULT
    assert found["versions"] >= 1
    assert 0.5 <= found["out_of_home"] < 1.0
    assert found["into_home"] < 0.5
