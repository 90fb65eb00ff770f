"""A run of which no group ever has two rewards, as a user starts it: what is told of it, how it ends, and what is left to mend it by."""

import json

import pytest

from rubato.runtime.errors import ExitCode
from tests.jobs import SMALL, rubato, write_model

pytestmark = pytest.mark.slow

REWARD = """
def first_alone(completions, *, trajectory, **columns):
    return [1.0 if name.split(".")[1] == "0" else None for name in trajectory]
"""

SERVICE = '  trainer: {class: "rubato.actors.training.trainer:Trainer"}\n'


def test_a_run_whose_groups_never_fill_is_told_so_and_ends_and_keeps_what_failed(tmp_path):
    (tmp_path / "mine.py").write_text(REWARD)
    config = SMALL.replace(SERVICE, SERVICE + '  reward_service: {class: "rubato.actors.rewards.service:RewardService"}\n')
    config = config.replace("group_size: 2", "group_size: 4") + f"model: {{path: {write_model(tmp_path / 'model')}}}\n"
    (tmp_path / "small.yaml").write_text(config)

    ended = rubato("launch", "small.yaml", "--run-dir", "run", "reward.functions=[mine.py:first_alone]", cwd=tmp_path)
    failed = rubato("samples", "run", "--fate", "failed", "--json", "-n", "5", cwd=tmp_path)

    assert ended.code == ExitCode.FAILED, ended.err
    few = "groups in a row had fewer than two rollouts with a reward (failed: reward_failed"
    assert f"8 {few} 24)" in ended.out + ended.err
    assert f"128 {few} 384)" in ended.err
    assert "Traceback" not in ended.err
    shown = [json.loads(line) for line in failed.out.splitlines()]
    assert len(shown) == 5
    for sample in shown:
        assert (sample["fate"], sample["reward"]) == ("failed", None)
        assert sample["reason"].startswith("reward_failed: wrong_type: ")
        assert all(turn["prompt"] or turn["completion"] for turn in sample["turns"])
