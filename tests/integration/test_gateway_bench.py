"""tools/bench/gateway.py: what a call costs the gateway, beside a bare starlette server."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.nightly
@pytest.mark.slow
def test_both_servers_are_measured_with_all_sessions_open_at_once(tmp_path):
    pytest.importorskip("openai", reason="the extra `agent` brings it")
    command = [sys.executable, ROOT / "tools/bench/gateway.py", "--calls", 64, "--sessions", 8, "--repeat", 2, "--json", tmp_path / "found"]
    subprocess.run(list(map(str, command)), check=True, timeout=150, cwd=ROOT)

    found = json.loads((tmp_path / "found").read_text())
    assert (found["sessions"], found["calls"]) == (8, 128)
    assert found["cpu_us_per_call"] > 0
    assert found["starlette_us_per_call"] > 0
    assert found["ratio"] == pytest.approx(found["cpu_us_per_call"] / found["starlette_us_per_call"])
    assert "rss_slope_b_per_call" in found
