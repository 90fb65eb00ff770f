"""Tail batching in a run as a user starts it: every prompt of the data set trains once per epoch, across a resumption too."""

import json
from collections import Counter

import pytest

from rubato.runtime.errors import ExitCode
from tests.jobs import SMALL, rubato, write_model

pytestmark = pytest.mark.slow

TASKS = """
tasks:
  sums: {data: {path: sums.jsonl, prompt: question, grader: places}, max_turns: 1}
  lake: {class: "rubato.actors.envs.frozen_lake:FrozenLakeText", max_turns: 3, kwargs: {}}
tail_batching: {enabled: true, eta_prompts: 1.5, eta_responses: 1.5}
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tail")
    (folder / "small.yaml").write_text(SMALL + TASKS + f"model: {{path: {write_model(folder / 'model')}}}\n")
    rows = [{"question": f"{n} + {n} =", "answer": f"left {n}"} for n in range(5)]
    (folder / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def trained(folder):
    """Steps in which each row of each task was trained."""
    lines = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    groups = {(s["task"], s["row"], s["group_id"]) for s in lines if s["fate"] in ("trained", "zero_spread")}
    return Counter((task, row) for task, row, _ in groups), {line["fate"] for line in lines}


@pytest.mark.parametrize("alpha", [0, 1])
def test_every_prompt_is_trained_once_per_epoch_before_and_after_a_resumption(place, alpha):
    run = f"alpha{alpha}"
    first = rubato("launch", "small.yaml", "--run-dir", run, "run.steps=4", f"staleness.alpha={alpha}", cwd=place)
    assert first.code == ExitCode.DONE, first.err
    assert set(trained(place / run)[0].values()) == {1}

    second = rubato("launch", "--resume", run, "run.steps=10", cwd=place)
    assert second.code == ExitCode.DONE, second.err

    times, fates = trained(place / run)
    assert [times["sums", row] for row in range(5)] == [2] * 5
    assert [times["lake", row] for row in range(10)] == [1] * 10
    assert "surplus" in fates
    events = [json.loads(line) for line in (place / run / "logs" / "sample_buffer-1.jsonl").read_text().splitlines()]
    whys = [each["why"] for each in events if each["event"] == "round"]
    assert {why.partition(":")[0] for why in whys} == {"short", "long"}


def test_what_can_not_be_is_refused_in_one_sentence(place):
    for change, words in (
        ("tail_batching.eta_prompts=0.5", "tail_batching.eta_prompts"),
        ("staleness.alpha=auto", "tail_batching plans rounds for one bound on age"),
        ("samples.extra_rollouts=1", "samples.extra_rollouts=1 has no effect beside tail_batching"),
    ):
        refused = rubato("launch", "small.yaml", "--run-dir", "refused", change, cwd=place)
        assert refused.code != ExitCode.DONE
        assert words in refused.err
        assert "Traceback" not in refused.err
        assert not (place / "refused").exists()
