"""tools/bench/forecast.py: whether predicted quantiles hold on what a run sampled."""

import json
from random import Random

import pytest

from tools.bench.forecast import limits, main, steps_of, worst


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


def test_time_in_environments_is_part_of_what_is_forecast(tmp_path):
    def off(env_s):
        run = write(tmp_path / str(len(env_s) + env_s[-1]), [1.0] * len(env_s))
        lines = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
        for line in lines[:-1]:
            took = env_s[line["step"] - 1]
            line |= {"env_s": took, "wall_s": took + line["tokens"] / 50}
        (run / "samples.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        return worst(steps_of(run))[0].off

    assert off([2.0] * 10) <= 0.05
    assert off([2.0] * 8 + [9.0]) > 0.2


def test_what_is_forecast_is_cut_at_the_limit_of_the_task(tmp_path):
    run = write(tmp_path / "cut", [1.0] * 16)
    lines = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    for line in lines:
        if (line["step"] or 0) > 8:
            line["tokens"] = min(line["tokens"], 20)
    (run / "samples.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    long = worst(steps_of(run))[0].off

    (run / "config.yaml").write_text("rollout: {max_turns: 2, max_new_tokens: 99}\ntasks: {t: {max_new_tokens: 10}}\n")

    assert limits(run) == {"t": 20}
    assert worst(steps_of(run))[0].off < long


def test_a_run_that_is_too_short_says_so_and_a_folder_that_is_none_is_refused(tmp_path, capsys):
    assert main([str(write(tmp_path / "short", [1.0] * 3))]) == 0
    assert "nothing to forecast" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main([str(tmp_path / "none")])
    assert "name the folder of a run" in capsys.readouterr().err
