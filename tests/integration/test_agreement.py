"""Trainer and engines compared in jobs of real processes: weights that never arrive end the run before it learns from them."""

import json
from pathlib import Path

import pytest

from tests.jobs import SMALL, rubato, write_model

DEAF = """
from actors.engines.torch_engine import StepLoop, TorchEngine


class Deaf(TorchEngine):
    \"\"\"Says that it has every version, and keeps the weights that it began with.\"\"\"

    async def update(self, version, weights):
        return await self._command(StepLoop.swap, version, self._started().runner.weights)
"""

BAD_ENVS = Path(__file__).parent / "bad_envs.py"


@pytest.fixture
def ended(tmp_path):
    """`ended(engine)`: how a job of 3 steps with that engine ended, and its rows."""

    def run(engine):
        (tmp_path / "deaf.py").write_text(DEAF)
        config = SMALL.replace("kind: scripted", f"kind: {engine}").replace(
            "check: {enabled: false}", "check: {every: 3}"
        )
        (tmp_path / "job.yaml").write_text(config.replace("env: {", f"env: {{class: '{BAD_ENVS}:Uneven', "))
        model = write_model(tmp_path / "model")
        done = rubato(
            "launch", "job.yaml", "--run-dir", "run", f"model.path={model}", "run.steps=3", "rollout.temperature=0.8",
            cwd=tmp_path,
        )  # fmt: skip
        lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
        return done, [json.loads(line) for line in lines]

    return run


def test_weights_that_never_arrive_end_the_run_after_the_first_update_with_the_likely_cause(ended):
    done, rows = ended("deaf.py:Deaf")

    assert done.code == 1
    assert "They agreed before this update, so its weights most likely never reached engine-1" in done.out + done.err
    assert rows == []


def test_an_engine_that_takes_them_agrees_after_every_update_that_is_compared(ended):
    done, rows = ended("torch")

    assert done.code == 0, done.out + done.err
    assert "trainer and engine agree" in done.out + done.err
    assert [row["step"] for row in rows if row.get("time/check", 0.0) > 0.0] == [1, 3]
