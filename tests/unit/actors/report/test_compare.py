"""Runs side by side: which are seeds of one setting, what settings differ in, final figures and curves."""

import json
from pathlib import Path

import pytest
import yaml

from rubato.actors.report.compare import main
from rubato.runtime.errors import LaunchError


@pytest.fixture
def make_run(tmp_path):
    """Writes a run of twenty steps whose reward is `reward` in the last ten, with two evaluations."""

    def make(name, seed, reward, steps=20, **train):
        folder = tmp_path / name
        folder.mkdir()
        config = {"run": {"seed": seed, "steps": 20, "dir": name}, "train": {"lr": 0.1, **train}}
        (folder / "config.yaml").write_text(yaml.safe_dump(config))
        rows = [{"step": n, "reward/mean": 0.0 if n <= 10 else reward, "time/wall_s": 2.0 * n} for n in range(1, 21)]
        rows[4]["eval/reward"] = 0.0
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:steps]) + '{"step": 2')
        evals = [{"version": 5, "reward": 0.1}, {"version": 20, "reward": reward / 2}]
        (folder / "evals.jsonl").write_text("".join(json.dumps(row) + "\n" for row in evals))
        return str(folder)

    return make


def shown(capsys, *argv):
    main(argv)
    return capsys.readouterr().out


def test_runs_that_differ_by_their_seed_are_one_setting_with_mean_and_spread(make_run, capsys):
    runs = [make_run("a1", 1, 0.5), make_run("a2", 2, 0.7), make_run("b1", 1, 0.9, lr=0.3)]

    one, other = json.loads(shown(capsys, *runs, "--json"))["settings"]

    assert (one["keys"], other["keys"]) == ({"train.lr": 0.1}, {"train.lr": 0.3})
    assert [run["seed"] for run in one["runs"]] == [1, 2]
    assert one["final"]["reward/mean"] == pytest.approx({"mean": 0.6, "sd": 0.2 / 2**0.5, "num": 2})
    assert other["final"]["reward/mean"] == pytest.approx({"mean": 0.9, "sd": 0.0, "num": 1})


CHANGED = [
    {"unix_s": 100.5, "changed": [{"key": "train.lr", "old": 0.3, "new": 0.2}]},  # before the first step
    {"unix_s": 111.5, "changed": [{"key": "train.lr", "old": 0.2, "new": 0.1}, {"key": "run.seed", "old": 1, "new": 1}]},
    {"unix_s": 130.0, "changed": [{"key": "train.clip_low", "old": 0.2, "new": 0.5}]},  # nothing was trained after it
]


def test_a_resumed_run_is_labelled_by_all_values_that_it_was_trained_under(make_run, capsys):
    resumed, plain = make_run("a", 1, 0.5, clip_low=0.5), make_run("b", 1, 0.7, clip_low=0.2)
    metrics = Path(resumed, "metrics.jsonl")
    rows = [json.loads(line) for line in metrics.read_text().splitlines()[:-1]]
    metrics.write_text("".join(json.dumps({**row, "time/unix_s": 100 + row["step"]}) + "\n" for row in rows))
    Path(resumed, "changes.jsonl").write_text("".join(json.dumps(line) + "\n" for line in CHANGED) + '{"unix')

    one, other = json.loads(shown(capsys, resumed, plain, "--json"))["settings"]
    (alone,) = json.loads(shown(capsys, resumed, "--json"))["settings"]

    assert one["keys"] == alone["keys"] == {"train.lr": "0.2, 0.1 from step 12"}
    assert other["keys"] == {"train.lr": 0.1}


def test_a_final_figure_is_the_mean_of_the_last_ten_steps_and_of_evaluations_the_newest(make_run, capsys):
    (setting,) = json.loads(shown(capsys, make_run("a1", 1, 0.5), "--json"))["settings"]

    (run,) = setting["runs"]
    assert run["final"] == pytest.approx({"reward/mean": 0.5, "eval/reward": 0.25})
    assert run["curves"]["eval/reward"] == [[5, 0.1], [20, 0.25]]
    assert (run["steps"], run["wall_s"]) == (20, 40.0)


def test_the_screen_has_what_differs_each_run_the_spread_and_curves_over_one_scale(make_run, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    runs = [make_run("a1", 1, 0.5), make_run("a2", 2, 0.7), make_run("b1", 1, 1.0, lr=0.3)]

    text = shown(capsys, *runs)

    assert "A  train.lr=0.1  (2 runs)\nB  train.lr=0.3  (1 run)\n" in text
    assert "mean ± sd of 2" in text
    assert "0.600 ± 0.141" in text
    assert "reward/mean, steps 0 to 20, from 0.000 (▁) to 1.000 (█)" in text
    assert any("█" * 18 in line for line in text.splitlines() if line.startswith("B seed 1"))
    assert not any("█" in line for line in text.splitlines() if line.startswith("  seed 1"))


def test_brackets_in_what_differs_are_shown_as_they_are(make_run, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")

    text = shown(capsys, make_run("a1", 1, 0.5, note="[red]x"), make_run("[bold]b1", 1, 0.5, note="[/]"))

    assert "[red]x" in text
    assert "[/]" in text
    assert "[bold]b1" in text


def test_a_run_that_has_not_come_as_far_is_told(make_run, capsys):
    text = shown(capsys, make_run("a1", 1, 0.5), make_run("a2", 2, 0.5, steps=12))

    assert "a2 has 12 of 20 steps: its figures are of step 12" in " ".join(text.split())


def test_other_metrics_are_compared_by_name(make_run, capsys):
    text = shown(capsys, make_run("a1", 1, 0.5), "--metric", "time/wall_s")

    assert "time/wall_s, steps 0 to 20" in text
    assert "reward/mean" not in text


def test_what_can_not_be_compared_is_one_sentence(make_run, tmp_path):
    run = make_run("a1", 1, 0.5)

    with pytest.raises(LaunchError, match=r"no run has the metric reward/men. Did you mean reward/mean\?"):
        main([run, "--metric", "reward/men"])
    with pytest.raises(LaunchError, match=r"holds no run: there is no config\.yaml in it"):
        main([run, str(tmp_path)])

    (tmp_path / "a1" / "metrics.jsonl").write_text("")
    with pytest.raises(LaunchError, match="has no step yet: there is nothing to compare"):
        main([run])


def test_a_run_whose_times_are_modelled_is_told_apart(make_run, capsys):
    measured, paced = make_run("a", 1, 0.5), make_run("b", 2, 0.5)
    with open(f"{paced}/metrics.jsonl", "a") as rows:
        rows.write('1, "reward/mean": 0.5, "paced/engines": 2.0}\n')

    told = shown(capsys, measured, paced)
    (setting,) = json.loads(shown(capsys, measured, paced, "--json"))["settings"]

    assert [run["paced"] for run in setting["runs"]] == [False, True]
    assert f"! {paced} is paced" in told
    assert f"! {measured} is paced" not in told
