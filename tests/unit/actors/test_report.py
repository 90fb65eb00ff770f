import json

import pytest

from actors.report import draw, read_run, summary


def run_of(folder, *rows, staleness="alpha: 1"):
    (folder / "config.yaml").write_text(f"run: {{steps: {len(rows)}}}\nstaleness: {{{staleness}}}\n")
    lines = [json.dumps({"step": i, "reward/mean": 0.5, "staleness/max": 7.0, **row}) for i, row in enumerate(rows, 1)]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    return read_run(folder)


def test_a_job_whose_bound_was_lifted_is_reported_without_one(tmp_path):
    run = run_of(tmp_path, {}, staleness="alpha: 1, bounded: false")
    draw(run, "", tmp_path / "report.png")

    assert run.alpha == -1


WAITED = {"time/step": 10.0, "time/wait_for_batch": 8.0, "idle/engine-1": 0.1, "idle/env_manager-1": 0.75}


@pytest.mark.parametrize(
    ("env_frac", "words"),
    [
        (0.9, "environment-bound: the trainer waited 80% of the time for batches, and rollouts spent 90% of theirs in"),
        (0.1, "generation-bound: the trainer waited 80%"),
    ],
)
def test_the_bound_of_a_run_is_where_its_rollouts_spend_their_time(env_frac, words, tmp_path):
    _, busy, _ = summary(run_of(tmp_path, WAITED | {"rollout/env_frac": env_frac}))

    assert busy.startswith(f"busy: engine 90%, env_manager 25% — {words}")
