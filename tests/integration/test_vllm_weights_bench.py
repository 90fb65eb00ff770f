"""The bench of what new weights cost vLLM: requests under way live through updates, out of the host's blob and out of a copy."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BENCH = ROOT / "tools" / "bench" / "vllm_weights.py"


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_requests_live_through_updates_by_both_ways():
    pytest.importorskip("vllm")

    ended = subprocess.run([sys.executable, BENCH, "--short", "--json"], cwd=ROOT, capture_output=True, text=True, timeout=580, check=False)

    assert ended.returncode == 0, ended.stderr[-3000:]
    found = json.loads(ended.stdout.splitlines()[-1])
    assert found["survived"] == found["asked"] > 0
    assert {"copied_pause_s", "copied_total_s", "transfer_pause_s", "transfer_total_s"} <= found.keys()
