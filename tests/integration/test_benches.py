"""Benches that a document quotes start, in a short form: each ends, and prints figures, which in this form say nothing of the system.

Of the bus and its peers, Rubato's side alone is started here.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BENCHES = ROOT / "tools" / "bench"

OWN = {
    "redundancy": "unit/tools/test_redundancy_bench.py",
    "rewards": "integration/test_rewards_bench.py",
    "rollout": "integration/test_rollout_bench.py",
    "tail": "integration/test_tail_bench.py",
    "turns": "integration/test_turns_bench.py",
}
"""Started by tests of their own, which also look at what they measure."""

SHORT = {
    "admission": (["--steps", "10"], r"rubato auto +\d"),
    "affinity": (["--short", "--only", "uniform"], r"all h800 +[\d.]+ samples/s paced"),
    "bulk": (["--runs", "1"], r"\d\.\d"),
    "bus": (["--runs", "1", "--only", "rubato"], r"rubato"),
    "circuits": (["--racks", "16", "--uplinks", "8", "--repeat", "1"], r"ring.*\d"),
    "coexecution": (["--jobs", "5", "--decisions", "2"], r"5.*\d"),
    "prefill_decode": (["--short"], r"2P2D: [\d.]+ samples/s paced"),
    "rlsim": (["1024"], r"one RL iteration, 1024 GPUs, rfabric: \d"),
    "weights_digest": (["--mib", "16", "--times", "2"], r"\d\.\d\d \("),
}
"""Arguments, and what stands among its figures."""

UNSTARTED = {
    "advice",
    "alpha_live",
    "gpu",
    "memory",
    "multiplexing",
    "orchestrator",
    "quickstart",
    "vs_trl",
    "warm_switch",
    "weights",
}
"""Have no short form that was seen to end within seconds; their parts have tests of their own, their whole is started by hand."""


def bench(name, *arguments):
    command = [sys.executable, BENCHES / f"{name}.py", *arguments]
    return subprocess.run(list(map(str, command)), cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)


def test_every_quoted_bench_is_started_in_a_short_form_or_named_as_not():
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]

    quoted = {name for page in pages for name in re.findall(r"tools/bench/(\w+)\.py", page.read_text())}

    assert quoted == {*OWN, *SHORT, *UNSTARTED, "forecast"}
    assert all(name in (ROOT / "tests" / file).read_text() for name, file in OWN.items())


@pytest.mark.slow
@pytest.mark.parametrize("name", SHORT)
def test_a_short_form_ends_and_prints_its_figures(name):
    arguments, figure = SHORT[name]

    ended = bench(name, *arguments)

    assert "Traceback" not in ended.stderr, ended.stderr[-3000:]
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert re.search(figure, ended.stdout), ended.stdout


def test_a_forecast_of_a_run_prints_how_far_it_is_off(tmp_path):
    rows = [
        {"step": step, "purpose": "train", "task": "t", "row": row, "tokens": 20 + row % 30}
        for step in range(1, 12)
        for row in range(50)
    ]
    (tmp_path / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    ended = bench("forecast", tmp_path)

    assert ended.returncode == 0, ended.stderr[-3000:]
    assert "points, at worst" in ended.stdout
