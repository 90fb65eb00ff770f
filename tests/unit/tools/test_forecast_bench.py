"""tools/bench/forecast.py: whether predicted quantiles hold on what a run sampled."""

import json
from random import Random

import pytest

from tools.bench.forecast import main, steps_of, worst


def write(run, scales, num=200):
    """A run whose trajectories have lengths around 40 tokens, times the scale of their step."""
    chance = Random(5)
    run.mkdir()
    lines = [
        {"step": step, "purpose": "train", "task": "t", "row": i, "tokens": round(scale * chance.lognormvariate(3.7, 0.8)) + 1}
        for step, scale in enumerate(scales, 1)
        for i in range(num)
    ]  # fmt: skip
    lines.append({"step": None, "purpose": "eval", "task": "t", "row": 0, "tokens": 10**6})
    (run / "samples.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return run


def test_quantiles_hold_where_steps_are_alike_and_are_off_where_lengths_jump(tmp_path):
    alike = worst(steps_of(write(tmp_path / "alike", [1.0] * 16)))
    jump = worst(steps_of(write(tmp_path / "jump", [1.0] * 8 + [3.0])))

    assert [each.ended for each in alike] == [0.0, 0.5, 0.8]
    assert max(each.off for each in alike) <= 0.05
    assert jump[0].off > 0.2


def test_a_run_that_is_too_short_says_so_and_a_folder_that_is_none_is_refused(tmp_path, capsys):
    assert main([str(write(tmp_path / "short", [1.0] * 3))]) == 0
    assert "nothing to forecast" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main([str(tmp_path / "none")])
    assert "name the folder of a run" in capsys.readouterr().err
