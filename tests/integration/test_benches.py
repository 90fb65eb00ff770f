"""Every bench that a document quotes starts, in a short form: it ends, and prints figures, which in this form say nothing of the system.

Of peers that only the extra `bench` brings (TRL, Ray, xoscar), Rubato's side alone is started here; `vs_trl` without TRL says that it needs it.
"""

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from actors.training.base_model import write_tokenizer
from tools.bench.rollout import MANAGERS, ROLES

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
    "advice": (["--only", "trainer", "--steps", "2"], r"as it is: [\d.]+ samples/s \(paced\)"),
    "affinity": (["--short", "--only", "uniform"], r"all h800 +[\d.]+ samples/s paced"),
    "bulk": (["--runs", "1"], r"\d\.\d"),
    "bus": (["--runs", "1", "--only", "rubato"], r"rubato"),
    "circuits": (["--racks", "16", "--uplinks", "8", "--repeat", "1"], r"ring.*\d"),
    "coexecution": (["--jobs", "5", "--decisions", "2"], r"5.*\d"),
    "memory": (
        ["--tokens", "64", "--layers", "0", "--dtype", "float32", "--ways", "chunks", "--rows", "64", "--threads", "1"],
        r"chunks.*\d",
    ),
    "multiplexing": (["--only", "two", "--steps", "1"], r"two: cost efficiency \d"),
    "orchestrator": (["--virtual", "--only", "uniform", "--seeds", "1"], r"uniform.*\d"),
    "prefill_decode": (["--short"], r"2P2D: [\d.]+ samples/s paced"),
    "rlsim": (["1024"], r"one RL iteration, 1024 GPUs, rfabric: \d"),
    "warm_switch": (["--turns", "1"], r"engine: warm \d"),
    "weights": (["--deltas"], r"1e-0?6"),
}
"""Arguments, and what stands among its figures."""

VERDICTS = {"advice", "multiplexing", "warm_switch"}
"""End with 1 where their figures miss what the document says, as those of a short form may."""


def bench(name, *arguments):
    command = [sys.executable, BENCHES / f"{name}.py", *arguments]
    return subprocess.run(list(map(str, command)), cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)


def test_every_quoted_bench_is_started_in_a_short_form():
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]

    quoted = {name for page in pages for name in re.findall(r"tools/bench/(\w+)\.py", page.read_text())}

    assert quoted == {*OWN, *SHORT, "alpha_live", "forecast", "gpu", "quickstart", "vs_trl"}
    assert all(name in (ROOT / "tests" / file).read_text() for name, file in OWN.items())


@pytest.mark.slow
@pytest.mark.parametrize("name", SHORT)
def test_a_short_form_ends_and_prints_its_figures(name):
    arguments, figure = SHORT[name]

    ended = bench(name, *arguments)

    assert "Traceback" not in ended.stderr, ended.stderr[-3000:]
    assert ended.returncode in ((0, 1) if name in VERDICTS else (0,)), ended.stderr[-3000:]
    assert re.search(figure, ended.stdout), ended.stdout


@pytest.mark.slow
def test_times_to_a_reward_are_of_the_jobs_that_were_launched(tmp_path):
    config = {
        "run": {"name": "short", "steps": 2},
        "actors": {role: {"class": path} for role, path in (ROLES | {"env_manager": MANAGERS["trajectory"]}).items()},
        "model": {"path": str(tmp_path / "model")},
        "env": {"class": "actors.envs.frozen_lake:FrozenLakeText", "isolation": "inline", "concurrency": 4},
        "engine": {"kind": "scripted"},
        "train": {"kind": "scripted", "batch_groups": 1, "group_size": 4, "scripted": {"step_s": 0.0, "weights_mib": 0.01}},
        "check": {"enabled": False},
        "eval": {"every": 0, "final_num_tasks": 0},
        "report": {"finish": ""},
    }  # fmt: skip
    write_tokenizer(tmp_path / "model")
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(config))

    ended = bench("alpha_live", "--config", tmp_path / "job.yaml", "--seeds", 1, "--alphas", 0)

    assert ended.returncode == 0, ended.stderr[-3000:]
    assert re.search(r"auto over α = 0: \S+, ahead on \d of 1 seeds", ended.stdout)


@pytest.mark.slow
def test_the_loop_of_one_process_prints_its_curve():
    ended = bench("quickstart", "--only", "loop", "--threads", 1, "run.steps=1")

    assert ended.returncode == 0, ended.stderr[-3000:]
    assert re.search(r"loop: .*1 steps in [\d.]+ s", ended.stdout)


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


def test_without_a_gpu_its_bench_says_that_there_is_nothing_to_measure():
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is a GPU, and its whole bench takes minutes")

    assert bench("gpu").returncode == 3


def test_the_bench_beside_trl_says_what_it_needs_where_trl_is_missing():
    if importlib.util.find_spec("trl"):
        pytest.skip("TRL is here, and the shortest run beside it takes minutes")

    ended = bench("vs_trl", "--seconds", 1)

    assert ended.returncode == 2
    assert "has no trl" in ended.stderr
