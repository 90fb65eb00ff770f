import json

import pytest

from rubato.actors.report.summary import draw, heading, read_run, summary


def run_of(folder, *rows, staleness="alpha: 1"):
    (folder / "config.yaml").write_text(f"run: {{steps: {len(rows)}}}\nstaleness: {{{staleness}}}\n")
    lines = [json.dumps({"step": i, "reward/mean": 0.5, "staleness/max": 7.0, **row}) for i, row in enumerate(rows, 1)]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    return read_run(folder)


CONFIG = "run: {steps: 4}\nstaleness: {alpha: 1}\n"


@pytest.fixture
def closing_lines(tmp_path):
    """Makes the closing lines of a run whose samples had `fates` (fate, reason), and whose steps had `flat` as share without spread."""

    def make(fates, flat=(0.0, 0.0, 0.0, 0.0)):
        rows = [{"step": i + 1, "reward/mean": 0.5, "policy/taught_frac": 1.0 - share} for i, share in enumerate(flat)]
        ends = [{"fate": fate, "reason": reason} for fate, reason in fates]
        (tmp_path / "config.yaml").write_text(CONFIG)
        (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (tmp_path / "samples.jsonl").write_text("".join(json.dumps(end) + "\n" for end in ends))
        return summary(read_run(tmp_path))

    return make


def test_a_job_whose_bound_was_lifted_is_reported_without_one(tmp_path):
    run = run_of(tmp_path, {}, staleness="alpha: 1, bounded: false")
    draw(run, "", tmp_path / "report.png")

    assert run.alpha == -1


def test_a_bound_that_moved_is_drawn_within_the_largest(tmp_path):
    run = run_of(tmp_path, {"staleness/alpha": 2}, staleness="alpha: auto, alpha_max: 6")
    draw(run, "", tmp_path / "report.png")

    assert run.alpha == 6


WAITED = {"time/step": 10.0, "time/wait_for_batch": 8.0, "idle/engine-1": 0.1, "idle/env_manager-1": 0.75}


ROLLOUTS = {"perf/samples_s": 1.6, "rollout/wall_s_mean": 20.0, "rollout/room": 16.0, "rollout/slots": 4.0}


@pytest.mark.parametrize(
    ("figures", "words"),
    [
        ({"rollout/env_frac": 0.1}, "10% of theirs in the environment — generation-bound: 1 engine more gives +100%"),
        (
            {"rollout/reward_frac": 0.8, "rollout/reward_workers": 1.0, "rollout/reward_each_s": 0.625},
            "0% of theirs in the environment and 80% in reward functions — reward-bound: reward.workers 1 → 2 gives +25%",
        ),
        (
            {"rollout/env_frac": 0.9, "rollout/env_workers": 2.0},
            "90% of theirs in the environment — environment-bound: env.workers 2 → 4 gives +100%, 1 environment manager more +100%",
        ),
    ],
)
def test_the_closing_lines_say_who_was_busy_and_what_would_help(figures, words, tmp_path):
    _, busy, _ = summary(run_of(tmp_path, WAITED | ROLLOUTS | figures))

    waited = "busy: engine 90%, env_manager 25%; the trainer waited 80% of the time for batches, rollouts spent "
    assert busy == waited + words


def test_a_run_whose_rows_lack_the_figures_is_reported_without_advice(tmp_path):
    _, busy, _ = summary(run_of(tmp_path, WAITED))

    assert busy.endswith("0% of theirs in the environment")


def test_samples_that_failed_are_never_hidden(closing_lines):
    lines = closing_lines([("trained", "")] * 240 + [("failed", "env_raised")] * 100 + [("failed", "reward_failed")] * 28
                          + [("stale", "")] * 4 + [("group_too_small", "")] * 12)  # fmt: skip

    assert "384 samples, 128 failed (33.3%), 4 dropped (1.0%), 12 left in groups too small to train (3.1%)" in lines[0]
    assert lines[1].startswith("! 33% of the samples failed, 100 of them as env_raised: ")


def test_a_run_without_losses_says_so_and_nothing_else(closing_lines):
    lines = closing_lines([("trained", "")] * 380 + [("unused", "")] * 4)

    assert "384 samples, 0 failed, 0 dropped, age ≤ 0" in lines[0]
    assert len(lines) == 3


def test_steps_in_which_nothing_could_be_learned_are_counted(closing_lines):
    lines = closing_lines([("zero_spread", "")] * 32, flat=(0.5, 1.0, 1.0, 1.0))

    assert lines[1].startswith("! in 3 of 4 steps nothing was learned from rewards: in no group did they have any spread")


@pytest.mark.parametrize(("num_idle", "begins"), [(0, "done"), (2, "done"), (4, "nothing was learned, done")])
def test_steps_that_changed_no_weight_are_counted_with_their_cause(num_idle, begins, tmp_path):
    updates = [{"policy/taught_frac": 1.0, "optim/updates": float(step >= num_idle)} for step in range(4)]

    first, *lines = summary(run_of(tmp_path, *updates))

    assert first.startswith(f"{begins}: ")
    assert [line.startswith(f"! in {num_idle} of 4 steps no weight changed: no sample") for line in lines].count(True) == bool(num_idle)


@pytest.mark.parametrize(
    ("config", "played"),
    [
        ("env: {class: 'mine.py:Lake'}\nmodel: {path: m}\n", "Lake · model m"),
        ("env: {class: 'a.b:FrozenLakeText'}\ntasks: {sum: {weight: 1}, only_shown: {weight: 0}, words: {}}\n", "sum, words"),
        ("tasks: {a: {}, b: {}, c: {}, d: {}}\n", "a, b, c, …"),
        ("", ""),
    ],
)
def test_the_report_is_headed_by_what_was_trained_on(config, played, tmp_path):
    run_of(tmp_path, {})
    (tmp_path / "config.yaml").write_text(CONFIG + config)

    parts = heading(read_run(tmp_path)).split(" · ")

    assert parts[0] == tmp_path.name
    assert " · ".join(parts[1:-1]) == played


@pytest.mark.parametrize(("share", "advice"), [(0.004, ""), (0.031, ": too many, raise engine.pace.scale or give eng")])
def test_times_that_are_modelled_are_never_told_as_measured(share, advice, tmp_path):
    config = "run: {steps: 1}\nstaleness: {alpha: 1}\nengine: {pace: {hardware: h20, model: qwen3-8b, scale: 0.1}}\n"
    run_of(tmp_path, {"paced/engines": 2.0, "paced/outlasted_frac": share})
    (tmp_path / "config.yaml").write_text(config)

    done, paced, *_ = summary(read_run(tmp_path))

    assert done.endswith("0 restarts · paced")
    assert paced.startswith(
        "! times are paced, not measured: 2 engines lasted what other hardware takes (hardware h20, model qwen3-8b, "
        f"scale 0.1); {share:.1%} of the steps took longer{advice}"
    )
