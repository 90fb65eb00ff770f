"""tools/bench/tail.py: its job trains each prompt once with lengths of the law, and its summary compares arms seed by seed."""

import json

import pytest

from tools.bench.peers.long_tail import SHRINK, law
from tools.bench.tail import GROUPS, SIZE, STEPS, Measured, measured, rows, run, summed_up

pytestmark = pytest.mark.slow


def test_an_arm_trains_every_prompt_once_on_responses_of_the_laws_lengths():
    found = run("on", 1, ["engine.pace.scale=0.05"])

    assert 30 < found.tokens < law().most / SHRINK / 2
    assert 0 < found.reward < 1


def test_a_run_that_left_a_prompt_out_counts_for_nothing(tmp_path):
    sample = {"fate": "trained", "reward": 1.0, "tokens": 5, "trajectory_id": "g0.0"}
    lines = [{**sample, "row": row, "group_id": f"g{row}"} for row in range(1, STEPS * GROUPS) for _ in range(SIZE)]
    (tmp_path / "samples.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "metrics.jsonl").write_text("{}\n")

    with pytest.raises(SystemExit, match="not each prompt once"):
        measured(tmp_path)


def test_harder_prompts_are_right_less_often_and_each_seed_has_its_own():
    shares = [float(row["answer"]) for row in rows(1)]

    assert 0.3 < sum(shares) / len(shares) < 0.7
    assert {row["prompt"] for row in rows(1)}.isdisjoint(row["prompt"] for row in rows(2))


def test_the_summary_is_of_pairs():
    off, on = [Measured(1.0, 0.5, 90.0, 0.0), Measured(2.0, 0.4, 80.0, 0.01)], [Measured(3.0, 0.5, 70.0, 0.0)] * 2

    summary = summed_up({"off": off, "on": on})

    assert summary["gain"] == 2.0
    assert summary["reward"]["difference"] == pytest.approx(0.05)
    assert summary["reward"]["noise"] == pytest.approx(2 * (0.4975 / (2 * STEPS * GROUPS * SIZE)) ** 0.5)
    assert summary["outlasted"] == {"off": 0.01, "on": 0.0}
