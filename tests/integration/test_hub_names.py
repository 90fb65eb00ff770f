"""Jobs whose model is a name at a hub, as a user launches them: what is kept of it, and what is left where it can't be had."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.hub import Hub, hub, model_files
from tests.jobs import COMMAND_S, SMALL, Ended, clean_environment, left_behind

pytestmark = pytest.mark.slow


def launch(there: Hub, place: Path, *arguments: str, offline: bool = False, verb: str = "launch") -> Ended:
    environment = clean_environment() | there.environment(place / "cache", offline=offline)
    command = [sys.executable, "-m", "rubato.runtime.cli", verb, *arguments]
    done = subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True, timeout=COMMAND_S, check=False)
    return Ended(done.returncode, done.stdout, done.stderr)


@pytest.mark.timeout(200)
def test_a_run_keeps_the_commit_of_its_model_and_is_resumed_with_it_without_the_hub(tmp_path):
    (tmp_path / "small.yaml").write_text(SMALL)
    with hub() as there:
        commit = there.add("acme/tiny", model_files())
        first = launch(there, tmp_path, "small.yaml", "model.path=acme/tiny", "--run-dir", "run")
        there.add("acme/tiny", {**model_files(), "README.md": b"moved on"})
        there.requests.clear()
        again = launch(there, tmp_path, "--resume", "run", "run.steps=3", offline=True)

    assert first.code == 0, first.err
    assert again.code == 0, again.err
    assert there.requests == []
    run = tmp_path / "run"
    path = yaml.safe_load((run / "config.yaml").read_text())["model"]["path"]
    assert path == f"acme/tiny@{commit}"
    assert (run / path / "README.md").read_bytes() == b"# a model"
    assert len((run / "metrics.jsonl").read_text().splitlines()) == 3
    assert left_behind(run) == []


@pytest.mark.timeout(200)
def test_a_name_that_cant_be_had_is_one_sentence_and_leaves_nothing(tmp_path):
    (tmp_path / "small.yaml").write_text(SMALL)
    with hub() as there:
        there.add("acme/gated", model_files(), gated=True)
        for dry in ([], ["--dry-run"]):
            ended = launch(there, tmp_path, "small.yaml", "model.path=acme/gated", *dry)

            assert ended.code == 2
            assert ended.err.count("\n") == 1
            assert "acme/gated is gated" in ended.err
    assert not os.path.exists(tmp_path / "runs") or not os.listdir(tmp_path / "runs")


@pytest.mark.timeout(200)
def test_a_model_of_the_hub_is_evaluated_by_its_name(tmp_path):
    (tmp_path / "small.yaml").write_text(SMALL)
    with hub() as there:
        there.add("acme/tiny", model_files())
        ended = launch(there, tmp_path, "acme/tiny", "small.yaml", "--json", "eval.final_num_tasks=2", verb="eval")

    assert ended.code == 0, ended.err
    row = json.loads(ended.out)
    assert (row["version"], row["num"] + row["failed"], row["model"]) == (0, 2, "acme/tiny")


@pytest.mark.timeout(200)
def test_a_dry_run_of_a_name_fetches_its_description_alone_and_prints_its_commit(tmp_path):
    (tmp_path / "small.yaml").write_text(SMALL)
    with hub() as there:
        commit = there.add("acme/tiny", model_files())
        ended = launch(there, tmp_path, "small.yaml", "model.path=acme/tiny", "--dry-run")

    assert ended.code == 0, ended.err
    assert f"path: acme/tiny@{commit}" in ended.out
    assert not [each for each in there.requests if "config.json" not in each and "/api/" not in each]


@pytest.mark.timeout(200)
def test_a_run_plays_and_resumes_rows_of_a_data_set_of_the_hub(tmp_path):
    rows = b"".join(b'{"question": "%d", "answer": "%d"}\n' % (number, number) for number in range(9))
    (tmp_path / "small.yaml").write_text(
        SMALL + "tasks: {sums: {data: {path: acme/sums, subset: main, eval_split: test, prompt: question}, max_turns: 1}}\n"
    )
    with hub() as there:
        commit = there.add("acme/sums", {"main/train.jsonl": rows, "main/test.jsonl": rows}, kind="dataset")
        there.add("acme/tiny", model_files())
        lacking = launch(there, tmp_path, "small.yaml", "model.path=acme/tiny", "tasks.sums.data.answer=anser", "--run-dir", "bad")
        first = launch(there, tmp_path, "small.yaml", "model.path=acme/tiny", "--run-dir", "run")
        there.add("acme/sums", {"main/train.jsonl": b"", "main/test.jsonl": b""}, kind="dataset")
        there.requests.clear()
        again = launch(there, tmp_path, "--resume", "run", "run.steps=3", offline=True)

    assert lacking.code == 2
    assert lacking.err.count("\n") == 1
    assert f"tasks.sums.data.answer: data file acme/sums@{commit}:main:train has no column anser" in lacking.err
    assert first.code == 0, first.err
    assert again.code == 0, again.err
    run = tmp_path / "run"
    assert yaml.safe_load((run / "config.yaml").read_text())["tasks"]["sums"]["data"]["path"] == f"acme/sums@{commit}"
    samples = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    assert {each["task"] for each in samples} == {"sums"}
    assert left_behind(run) == []
