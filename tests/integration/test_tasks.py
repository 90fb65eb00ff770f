"""A mixture of tasks in one run, as a user starts it, and everything that can be wrong with one."""

import json
from collections import Counter

import pytest

from rubato.actors.report.metrics import described
from rubato.runtime.errors import ExitCode
from tests.jobs import SMALL, rubato, write_model

pytestmark = pytest.mark.slow

TASKS = """
tasks:
  lake: {class: "rubato.actors.envs.frozen_lake:FrozenLakeText", max_turns: 2}
  sums: {weight: 2, data: {path: sums.jsonl, prompt: question, eval_rows: 3, grader: places}, max_turns: 1}
"""

SAMPLER = """
def nothing(rows, *, epoch, seed):
    return []
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tasks")
    config = SMALL.replace("final_num_tasks: 0", "final_num_tasks: 5") + TASKS + f"model: {{path: {write_model(folder / 'model')}}}\n"
    (folder / "small.yaml").write_text(config)
    rows = [{"question": f"{n} + {n} =", "answer": f"left {n}"} for n in range(8)]
    (folder / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "own.py").write_text(SAMPLER)
    (folder / "torn.jsonl").write_text('{"question": "1", "answer": "1"}\n{"question": \n')
    (folder / "empty.jsonl").touch()
    return folder


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_each_task_gets_its_share_and_each_row_its_turn_in_a_run_and_after_its_resumption(place):
    first = rubato("launch", "small.yaml", "--run-dir", "run", "run.steps=3", cwd=place)
    assert first.code == ExitCode.DONE, first.err
    second = rubato("launch", "--resume", "run", "run.steps=6", cwd=place)
    assert second.code == ExitCode.DONE, second.err

    given = {s["group_id"]: (s["task"], s["row"]) for s in lines(place / "run" / "samples.jsonl")}
    shares = Counter(task for task, _ in given.values())
    assert abs(shares["sums"] - 2 * shares["lake"]) <= 2
    rows = [row for _, (task, row) in sorted(given.items()) if task == "sums"]
    assert len({*rows[:5]}) == 5
    assert len({*rows[5:10]}) == len(rows[5:10])
    assert [name for each in lines(place / "run" / "metrics.jsonl") for name in each if described(name) is None] == []
    row = lines(place / "run" / "metrics.jsonl")[-1]
    assert {"task/sums/trained_frac", "task/lake/trained_frac"} <= row.keys()
    assert any("task/sums/reward" in each for each in lines(place / "run" / "metrics.jsonl"))
    held_out = lines(place / "run" / "evals.jsonl")[-1]
    assert held_out["num"] == 3 + 5
    assert {"task/sums/reward", "task/lake/reward", "task/sums/pass@1", "task/lake/avg@1"} <= held_out.keys()
    samples = lines(place / "run" / "evals" / f"{held_out['version']}.jsonl")
    assert Counter(sample["task"] for sample in samples) == {"sums": 3, "lake": 5}
    assert all(sample["turns"] for sample in samples)
    assert any(sample["text"] for sample in samples)


def test_a_run_does_not_go_on_with_other_rows_and_loses_nothing(place):
    first = rubato("launch", "small.yaml", "--run-dir", "other", "run.steps=1", cwd=place)
    assert first.code == ExitCode.DONE, first.err

    refused = rubato("launch", "--resume", "other", "run.steps=2", "tasks.sums.data.eval_rows=4", cwd=place)
    before = (place / "sums.jsonl").read_text()
    (place / "sums.jsonl").write_text("".join(reversed(before.splitlines(keepends=True))))
    mixed_up = rubato("launch", "--resume", "other", "run.steps=2", "tasks.sums.data.eval_rows=3", cwd=place)
    (place / "sums.jsonl").write_text(before)
    gone_on = rubato("launch", "--resume", "other", "run.steps=2", "tasks.sums.data.eval_rows=3", cwd=place)

    assert refused.code == ExitCode.FAILED, refused.err
    assert "tasks.sums has 4 rows to train on, where this run had 5" in refused.err
    assert mixed_up.code == ExitCode.FAILED, mixed_up.err
    assert f"tasks.sums: the content of {place}/sums.jsonl is not what this run was trained on so far" in mixed_up.err
    assert "Traceback" not in refused.err + mixed_up.err
    assert gone_on.code == ExitCode.DONE, gone_on.err


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (("tasks.sums.weight=0", "tasks.lake.weight=0"), "the weights of lake, sums sum to 0"),
        (("tasks.sum.weight=2",), "sum names none of class, data, reasoning_gym, textarena, verifiers, agent. Did you mean sums?"),
        (("tasks.sums.data.prompt=questoin",), "has no column questoin"),
        (("tasks.sums.data.prompt=questoin",), "Did you mean question?"),
        (("tasks.sums.data.grader=place",), "Did you mean places?"),
        (("tasks.sums.data.grader=own.py:none",), "tasks.sums.data.grader: "),
        (("tasks.sums.data.path=torn.jsonl",), "torn.jsonl, line 2: not valid JSON"),
        (("tasks.sums.data.path=empty.jsonl",), "empty.jsonl is empty"),
        (("tasks.sums.data.pth=x",), "Did you mean tasks.sums.data.path?"),
        (("tasks.sums.max_new_tokens=4096",), "tasks.sums.max_new_tokens is 4096; it must be below rollout.max_len"),
        (("tasks.sums.rewards=[own.py:f]",), "tasks.sums.rewards names "),
        (("tasks.gym.reasoning_gym=chain_sums",), "Did you mean chain_sum?"),
    ],
)
def test_a_mistake_in_the_tasks_is_one_sentence_before_anything_starts(place, changes, words):
    ended = rubato("launch", "small.yaml", "--dry-run", *changes, cwd=place)

    assert ended.code == ExitCode.REFUSED, ended.out
    assert words in ended.err
    assert "Traceback" not in ended.err
    assert len(ended.err.strip().splitlines()) == 1


def test_a_sampler_that_gives_no_rows_ends_the_job_with_one_sentence(place):
    ended = rubato("launch", "small.yaml", "--run-dir", "idle", "tasks.sums.data.sampler=own.py:nothing", cwd=place)

    assert ended.code == ExitCode.FAILED
    assert "gave no rows for epoch 0" in ended.err
    assert "Traceback" not in ended.err
