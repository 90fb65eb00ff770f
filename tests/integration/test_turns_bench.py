"""tools/bench/turns.py: what a turn costs, role by role, beside the same turns over HTTP."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ROLES = {"env_manager", "llm_proxy", "sample_buffer", "reward_service", "engine", "trainer", "node", "store"}


def bench(*arguments: object) -> None:
    command = [sys.executable, ROOT / "tools/bench/turns.py", *arguments]
    subprocess.run(list(map(str, command)), check=True, timeout=150, cwd=ROOT)


@pytest.mark.slow
@pytest.mark.nightly
def test_every_role_has_its_cost_and_engine_and_trainer_are_left_out_of_the_sum(tmp_path):
    bench("--only", "rubato", "--seconds", 2, "--json", tmp_path / "found.json")
    found = json.loads((tmp_path / "found.json").read_text())
    assert set(found["by_role"]) >= ROLES
    others = sum(us for role, us in found["by_role"].items() if role not in ("engine", "trainer"))
    assert found["cpu_us_per_turn"] == pytest.approx(others)
    assert found["turns_s"] > 0


@pytest.mark.slow
@pytest.mark.nightly
def test_over_http_client_and_server_count_together(tmp_path):
    pytest.importorskip("openai", reason="the extra `bench` brings it")
    bench("--only", "http", "--seconds", 1, "--json", tmp_path / "found.json")
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["http_cpu_us_per_turn"] > found["http_server_us_per_turn"] > 0
