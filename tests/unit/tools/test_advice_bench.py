"""The bench of advice: what it changes for each advice, what it counts, and when it fails."""

import pytest

from actors.engines.pace import MOST_OUTLASTED
from planning.advice import SingleChange
from tools.bench import advice as bench


def measured(*, first=True, base=0.0, changed=0.0):
    """A job of the bench."""
    changes = [{"change": "α 1 → 2", "predicted": 0.1, "measured": 0.1, "outlasted_frac": changed}]
    return {"samples_s": 1.0, "advice": "", "changes": changes, "first_helps_most": first, "outlasted_frac": base}


@pytest.mark.parametrize("name", ["engine", "env_manager", "alpha", "concurrency"])
def test_a_change_is_made_by_its_own_key(name):
    job = bench.COMMON | bench.JOBS["slots"]
    key = bench.KEYS[name]
    before = int(job[key])

    changed = bench.applied(job, SingleChange(name, before, 2 * before, 0.1))

    assert {k: v for k, v in changed.items() if job[k] != v} == {key: 2 * before}


def test_a_trainer_that_is_twice_as_fast_takes_half_as_long():
    job = bench.COMMON | bench.JOBS["trainer"]

    assert bench.applied(job, SingleChange("trainer", 1, 2, 0.1))["train.scripted.step_s"] == 2.0


def test_throughput_is_that_of_the_time_after_the_first_quarter():
    rows = [{"perf/samples_s": 100.0, "time/step": 9.0}] * 2 + [{"perf/samples_s": 4.0, "time/step": 1.0}] * 5
    rows.append({"perf/samples_s": 1.0, "time/step": 10.0})

    assert bench.samples_s(rows) == pytest.approx((5 * 4.0 + 10.0) / 15.0)


def test_the_share_that_outlasted_is_that_of_the_whole_run():
    assert bench.outlasted([{"paced/outlasted_frac": 0.5}, {"paced/outlasted_frac": 0.01}]) == 0.01


@pytest.mark.parametrize(
    ("job", "late"),
    [
        (measured(base=MOST_OUTLASTED, changed=MOST_OUTLASTED), []),
        (measured(base=0.03), ["engine as it is"]),
        (measured(changed=0.03), ["engine with α 1 → 2"]),
    ],
)
def test_an_arm_that_outlasted_its_pace_is_named_and_fails_the_bench(monkeypatch, capsys, job, late):
    assert bench.late_arms({"engine": job}) == late

    monkeypatch.setattr(bench, "measure", lambda settings, steps, most: job)
    assert bench.main(["--only", "engine"]) == (1 if late else 0)
    assert all(arm in capsys.readouterr().out for arm in late)


def test_a_first_advice_that_does_not_help_most_fails_the_bench(monkeypatch):
    monkeypatch.setattr(bench, "measure", lambda settings, steps, most: measured(first=False))

    assert bench.main(["--only", "engine"]) == 1
