"""Benches that a document quotes start, in a short form: each ends, and prints figures, which in this form say nothing of the system.

Of the bus and its peers, Rubato's side alone is started here.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tools.bench.short import NO_RESULT

ROOT = Path(__file__).resolve().parents[2]
BENCHES = ROOT / "tools" / "bench"

OWN = {
    "drains": "integration/test_drains_bench.py",
    "failovers": "integration/test_failovers.py",
    "gateway": "integration/test_gateway_bench.py",
    "padding": "unit/tools/test_padding.py",
    "parts": "integration/test_parts_bench.py",
    "pods": "integration/test_pods_bench.py",
    "rewards": "integration/test_rewards_bench.py",
    "rollout": "integration/test_rollout_bench.py",
    "tail": "integration/test_tail_bench.py",
    "turns": "integration/test_turns_bench.py",
    "vllm_weights": "integration/test_vllm_weights_bench.py",
}
"""Started by tests of their own, which also look at what they measure."""

FEW = {
    "adapters": (["--hidden", "128", "--layers", "2", "--slots", "4"], r"step_two_mixed_ms +\d"),
    "affinity": (["--short", "--only", "uniform"], r"all h800 +[\d.]+ samples/s paced"),
    "bulk": (["--runs", "1"], r"\d\.\d"),
    "bus": (["--runs", "1", "--only", "rubato"], r"rubato"),
    "prefill_decode": (["--short"], r"2P2D: [\d.]+ samples/s paced"),
    "scale": (["--hosts", "1", "2", "--short"], r"2 hosts joined in +[\d.]+ s.*µs of CPU a trajectory"),
    "soak": (["--minutes", "0.4"], r"folder -?\d+ B/step, Redis -?\d+ B/step"),
    "rlsim": (["1024"], r"one RL iteration, 1024 GPUs, rfabric: \d"),
}
"""Arguments, and what stands among its figures."""

SHORT = {
    "alpha_live": ([], r"α auto: \S+ s to the goal"),
    "failures": ([], r'"useful_frac": 0\.\d+, "useful_frac_whole": 0\.\d+, "hits": 2'),
    "fit": ([], r"adapter +\d+ MB measured"),
    "multiplexing": ([], r"short: cost efficiency \d"),
    "orchestrator": ([], r"uniform: off [\d.]+ s, on [\d.]+ s.*virtual"),
    "quickstart": ([], r"actors: 0.8 after .* 3 steps in \d"),
    "ranks": ([], r"grad_rel_err +\d"),
    "slo": ([], r"attained: \d+% of 3 jobs"),
    "stragglers": ([], r"drop over wait: steps/s \d"),
    "vs_trl": ([], r"Rubato: [\d.]+ samples/s"),
    "weights": (["--deltas"], r'"changed_frac": 0\.\d'),
}
"""The same of those whose short form says itself that it is no result."""


def bench(name, *arguments):
    command = [sys.executable, BENCHES / f"{name}.py", *arguments]
    return subprocess.run(list(map(str, command)), cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)


def test_every_quoted_bench_is_started_in_a_short_form():
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]

    quoted = {name for page in pages for name in re.findall(r"tools/bench/(\w+)\.py", page.read_text())}

    assert quoted == {*OWN, *FEW, *SHORT, "gpu"}
    assert all(name in (ROOT / "tests" / file).read_text() for name, file in OWN.items())


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", FEW)
def test_a_bench_of_few_figures_ends_and_prints_them(name):
    arguments, figure = FEW[name]

    ended = bench(name, *arguments)

    assert "Traceback" not in ended.stderr, ended.stderr[-3000:]
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert re.search(figure, ended.stdout), ended.stdout


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", SHORT)
def test_a_short_form_ends_and_says_that_its_figures_are_no_result(name):
    arguments, figure = SHORT[name]

    ended = bench(name, "--short", *arguments)

    assert "Traceback" not in ended.stderr, ended.stderr[-3000:]
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert NO_RESULT in ended.stdout
    assert re.search(figure, ended.stdout), ended.stdout


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_the_bench_of_weights_plays_a_job_over_a_link(tmp_path):
    ended = bench("weights", "--short", "--json", "--run-dir", tmp_path / "run")

    if ended.stderr.startswith("no test-bed: "):
        pytest.skip(ended.stderr)
    assert ended.returncode == 0, ended.stderr[-3000:]
    found = json.loads(ended.stdout)
    assert found["note"] == NO_RESULT
    assert found["away"]["versions"] >= 1


def test_the_bench_of_a_gpu_says_that_there_is_none_and_exits_with_3(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")

    ended = bench("gpu")

    assert (ended.returncode, ended.stdout) == (3, "")
    assert ended.stderr == "no CUDA GPU here: nothing was measured\n"


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.timeout(300)
@pytest.mark.parametrize("part", ["engine", "trainer", "swap", "agreement", "gsm8k", "ranks"])
def test_a_part_of_a_gpu_day_starts_without_a_gpu_and_leaves_its_figures_and_the_table(tmp_path, part):
    ended = bench("gpu", part, "--short", "--out", tmp_path)

    assert ended.returncode == 0, ended.stderr[-3000:]
    assert NO_RESULT in ended.stdout
    assert json.loads((tmp_path / f"{part}.json").read_text())["found"]
    assert "| what | figure | beside it |" in (tmp_path / "table.md").read_text()


def test_a_gpu_day_without_a_gpu_says_so_and_exits_with_3(monkeypatch, tmp_path):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("PYTHON", sys.executable)
    monkeypatch.setenv("GPU_DAY_OUT", str(tmp_path))

    day = [ROOT / "tools" / "gpu_day.sh", "swap"]
    ended = subprocess.run(day, capture_output=True, text=True, timeout=120, check=False)

    assert ended.returncode == 3
    assert "no CUDA GPU here: nothing was measured" in ended.stdout


def test_a_part_that_is_none_is_refused_with_those_that_are():
    ended = bench("gpu", "trainr")

    assert ended.returncode == 2
    assert "trainr is no part. Parts are engine, trainer, swap," in ended.stderr
