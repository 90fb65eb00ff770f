"""The benchmark beside TRL gives both sides one environment, compares like with like, and leaves no process behind."""

import itertools
import json
import random
import statistics
import sys

import psutil
import pytest

from tools.bench import vs_trl
from tools.bench.peers.latent_lake import LatentLake, delay
from tools.bench.vs_trl import Look, Played, Row


def run_of(rate: float, *, batches: int = 5, cpu_s: float = 1.0) -> Played:
    """A run that trains `rate` samples a second on `cpu_s` CPU seconds a second, two seconds after its command."""
    rows = [Row(n * 256, n / 10, 6.0, 102.0 + (n - 1) * 256 / rate) for n in range(1, batches + 1)]
    return Played(100.0, rows, [Look(row.unix_s, row.unix_s * cpu_s, 300.0, 200.0) for row in rows])


@pytest.mark.parametrize(("latency", "seconds"), [("0", {0.0}), ("50ms", {0.05})])
def test_even_latencies_are_what_they_are_called(latency, seconds):
    assert {delay(latency, random.Random(seed)) for seed in range(100)} == seconds


def test_the_heavy_tail_has_a_median_of_10_ms_and_a_second_for_one_step_in_fifty():
    chance = random.Random(1)

    drawn = [delay("tail", chance) for _ in range(20_000)]

    assert statistics.median(drawn) == pytest.approx(0.010, rel=0.1)
    assert sum(seconds == 1.0 for seconds in drawn) / len(drawn) == pytest.approx(0.02, rel=0.2)


async def test_the_nth_environment_of_either_side_draws_the_same_delays_and_no_two_wait_alike(monkeypatch):
    slept = []

    async def sleep(seconds):
        slept.append(seconds)

    monkeypatch.setattr("tools.bench.peers.latent_lake.asyncio.sleep", sleep)
    for _ in ("ours", "theirs"):
        monkeypatch.setattr(LatentLake, "numbers", itertools.count())
        for lake in (LatentLake(latency="tail"), LatentLake(latency="tail")):
            await lake.reset(seed=7)
            for _ in range(5):
                await lake.step("up")

    assert slept[:10] == slept[10:]
    assert slept[:5] != slept[5:10]


def test_rows_of_both_sides_read_alike_and_a_line_that_is_being_written_is_left_out(tmp_path):
    ours = {"step": 2, "reward/mean": 0.5, "rollout/turns_mean": 6.0, "time/unix_s": 9.0, "policy/loss": 0.1}
    theirs = {"samples": 512, "reward": 0.5, "turns": 6.0, "unix_s": 9.0}
    for name, row in (("ours", ours), ("theirs", theirs)):
        (tmp_path / name).write_text(json.dumps(row) + "\n" + json.dumps(row)[:7])

    found = [vs_trl.read_rows(tmp_path / name) for name in ("ours", "theirs", "neither")]

    assert found == [[Row(512, 0.5, 6.0, 9.0)], [Row(512, 0.5, 6.0, 9.0)], []]


def test_rates_count_from_the_first_batch_and_rewards_compare_after_equal_samples():
    found = vs_trl.point("0", [(run_of(300.0, batches=9, cpu_s=2.0), run_of(100.0, batches=4))])

    assert found["rubato_samples_s"] == pytest.approx(300.0)
    assert found["trl_samples_s"] == pytest.approx(100.0)
    assert found["ratio"] == pytest.approx(3.0)
    assert found["reward_after"] == 4 * 256
    assert found["rubato"]["reward_after_samples"] == found["trl"]["reward_after_samples"] == pytest.approx(0.3)
    assert found["rubato"]["reward_at_end"] == pytest.approx(0.8)
    assert found["rubato"]["cpu_s_per_1000"] == pytest.approx(2000 / 300)
    assert found["trl"]["first_step_s"] == pytest.approx(2.0)


def test_a_point_is_the_median_of_its_runs():
    runs = [(run_of(ours), run_of(theirs)) for ours, theirs in ((100.0, 50.0), (300.0, 60.0), (200.0, 40.0))]

    found = vs_trl.point("tail", runs)

    assert found["ratio"] == pytest.approx(200 / 50)
    assert [run["trl"]["samples_s"] for run in found["runs"]] == pytest.approx([50.0, 60.0, 40.0])


def test_our_side_is_the_quickstart_with_the_environment_of_both(tmp_path):
    command, rows = vs_trl.rubato(tmp_path, "tail", 3)

    config = vs_trl.yaml.safe_load((tmp_path / "rubato.yaml").read_text())
    assert config["run"]["seed"] == 3
    assert config["env"]["class"].endswith("latent_lake.py:LatentLake")
    assert config["env"]["kwargs"] == {"latency": "tail"}
    assert vs_trl.TrainSection(**config["train"]) == vs_trl.TRAIN
    assert rows.parent.as_posix() == command[-1]


FAMILY = """
import pathlib, signal, subprocess, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
out = pathlib.Path(sys.argv[1])
(out / "child").write_text(str(child.pid))
row = '{"samples": %d, "reward": 0.5, "turns": 6.0, "unix_s": %d}'
(out / "rows").write_text("".join(row % (n * 256, n) + "\\n" for n in range(1, 4)))
child.wait()
"""


async def test_what_was_started_is_ended_with_all_that_came_from_it(tmp_path, monkeypatch):
    monkeypatch.setattr(vs_trl, "LOOK_S", 0.01)
    monkeypatch.setattr(vs_trl, "END_S", 0.1)

    played = await vs_trl.play([sys.executable, "-c", FAMILY, str(tmp_path)], tmp_path / "rows", tmp_path / "log", 1.0)

    assert len(played.rows) == 3
    try:
        child = psutil.Process(int((tmp_path / "child").read_text()))
        if child.status() != psutil.STATUS_ZOMBIE:
            child.wait(timeout=10)  # raises where it lives on; what it ended with depends on who reaps it
    except psutil.NoSuchProcess:
        pass


async def test_a_side_that_trains_nothing_is_named_with_its_last_words(tmp_path, monkeypatch):
    monkeypatch.setattr(vs_trl, "LOOK_S", 0.01)
    command = [sys.executable, "-c", "print('first'); raise SystemExit('no such model')"]

    with pytest.raises(RuntimeError, match="trained 0 batches in 0 s: no such model"):
        await vs_trl.play(command, tmp_path / "rows", tmp_path / "log", 1.0)


MISTAKES = [
    pytest.param(["--trl-python", "/bin/false"], "/bin/false has no trl. Run pip install -e '.[bench]'", id="no trl"),
    pytest.param(["--trl-python", "/nowhere"], "No such file or directory: '/nowhere'", id="no interpreter"),
    pytest.param(["--runs", "0"], "--runs must be at least 1", id="no runs"),
    pytest.param(["--seconds", "nan"], "--seconds a finite number above 0", id="seconds nan"),
    pytest.param(["--json", "/nonexistent/x"], "No such file or directory: '/nonexistent/x'", id="json nowhere"),
]


@pytest.mark.parametrize(("given", "sentence"), MISTAKES)
def test_a_mistake_is_told_before_anything_runs(given, sentence, capsys):
    with pytest.raises(SystemExit) as ended:
        vs_trl.main(given)

    assert ended.value.code == 2
    assert sentence in capsys.readouterr().err
