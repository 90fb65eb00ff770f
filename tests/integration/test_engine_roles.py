"""A job whose engines run under two roles, none of them called engine: both sample, and both take new weights."""

import json
from pathlib import Path

import pytest

from tests.jobs import left_behind, rubato

JOB = Path(__file__).parents[2] / "configs/cluster_job.yaml"


@pytest.mark.slow
def test_a_job_trains_and_evaluates_with_engines_of_two_roles(tmp_path):
    line = '  engine: {class: "rubato.actors.engines.worker:EngineWorker"}\n'
    text = JOB.read_text()
    assert line in text
    (tmp_path / "job.yaml").write_text(text.replace(line, line.replace("engine:", "near_engine:") + line.replace("engine:", "far_engine:")))

    ended = rubato(
        "launch", "job.yaml", "run.steps=4", "eval.every=2", "eval.num_tasks=4", "train.scripted.step_s=0.1",
        "engine.scripted.token_s=0.005", "--run-dir", "run", cwd=tmp_path,
    )  # fmt: skip

    assert ended.code == 0, ended.err
    rows = [json.loads(row) for row in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert all({"idle/near_engine-1", "idle/far_engine-1"} <= set(row) for row in rows[1:])
    assert len((tmp_path / "run/evals.jsonl").read_text().splitlines()) >= 2
    for name in ("near_engine-1", "far_engine-1"):
        assert "weights_swapped" in (tmp_path / f"run/logs/{name}.jsonl").read_text()
    assert not left_behind(tmp_path)
