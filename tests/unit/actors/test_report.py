import json

from actors.report import draw, read_run


def test_a_job_whose_bound_was_lifted_is_reported_without_one(tmp_path):
    (tmp_path / "config.yaml").write_text("run: {steps: 1}\nstaleness: {alpha: 1, bounded: false}\n")
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1, "reward/mean": 0.5, "staleness/max": 7.0}) + "\n")

    run = read_run(tmp_path)
    draw(run, "", tmp_path / "report.png")

    assert run.alpha == -1
