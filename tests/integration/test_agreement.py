"""Trainer and engines compared in jobs of real processes: weights that never arrive end the run before it learns from them."""

import json
from pathlib import Path

import pytest

from tests.jobs import LEARNING, rubato, write_model

pytestmark = pytest.mark.slow

DEAF = """
from rubato.actors.engines.torch_engine import StepLoop, TorchEngine


class Deaf(TorchEngine):
    \"\"\"Says that it has every version, and from FROM on keeps the weights that it has.\"\"\"

    async def update(self, version, weights):
        if version < FROM:
            return await super().update(version, weights)
        return await self.command(StepLoop.swap, version, self.started().runner.weights)


class Silent(Deaf):
    \"\"\"Tells nothing of its tensors, as an engine whose class can't.\"\"\"

    digest = None
"""

ODD = """
from rubato.actors.scripted.engine import ScriptedEngine


class Odd(ScriptedEngine):
    \"\"\"Of one request in eight the log-probabilities are none.\"\"\"

    def _token(self, sequence):
        token, logprob = super()._token(sequence)
        return token, 0.5 if sequence.draws % 8 == 0 else logprob
"""

BAD_ENVS = Path(__file__).parent / "bad_envs.py"


@pytest.fixture
def ended(tmp_path):
    """`ended(engine, …)`: how a job of 3 steps with that engine, deaf from version `since` on, ended, and its rows."""

    def run(engine, *overrides, since=0):
        (tmp_path / "deaf.py").write_text(DEAF.replace("FROM", str(since)))
        config = LEARNING.replace("kind: scripted", f"kind: {engine}").replace("check: {enabled: false}", "check: {every: 3}")
        (tmp_path / "job.yaml").write_text(config.replace("env: {", f"env: {{class: '{BAD_ENVS}:Uneven', "))
        model = write_model(tmp_path / "model")
        done = rubato(
            "launch", "job.yaml", "--run-dir", "run", f"model.path={model}", "run.steps=3", "rollout.temperature=0.8",
            *overrides, cwd=tmp_path,
        )  # fmt: skip
        lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
        return done, [json.loads(line) for line in lines]

    return run


def test_weights_that_never_arrive_end_the_run_after_the_first_update_with_the_likely_cause(ended):
    done, rows = ended("deaf.py:Silent")

    assert done.code == 1
    assert "They agreed before this update, so its weights most likely never reached engine-1" in done.out + done.err
    assert rows == []


@pytest.mark.nightly
def test_weights_that_stop_arriving_near_the_end_are_found_before_the_run_is_done(ended):
    done, rows = ended("deaf.py:Silent", "check.every=0", since=3)

    assert done.code == 1
    assert "trainer and engine disagree: mean |Δlogp|" in done.out + done.err
    assert [row["step"] for row in rows] == [1, 2]


@pytest.mark.nightly
def test_weights_that_never_arrive_are_found_in_the_tensors_however_small_the_steps_are(ended):
    done, _ = ended("deaf.py:Deaf", "train.lr=1e-6", "check.every=0", since=2)

    assert done.code == 1
    assert "trainer and engine disagree: engine-1 says that it has weights version" in done.err
    assert "sampled slices differ" in done.err


def test_an_engine_that_takes_them_agrees_after_every_update_that_is_compared(ended):
    done, rows = ended("torch")

    assert done.code == 0, done.out + done.err
    assert "trainer and engine agree" in done.out + done.err
    assert [row["step"] for row in rows if row.get("time/check", 0.0) > 0.0] == [1, 3]


def test_log_probabilities_that_are_none_fail_their_samples_by_engine_and_flaw_while_the_run_goes_on(tmp_path):
    (tmp_path / "odd.py").write_text(ODD)
    (tmp_path / "job.yaml").write_text(LEARNING.replace("env: {", f"env: {{class: '{BAD_ENVS}:Uneven', "))
    model = write_model(tmp_path / "model")

    done = rubato(
        "launch", "job.yaml", "--run-dir", "run", f"model.path={model}", "run.steps=6", "engine.kind=odd.py:Odd",
        cwd=tmp_path,
    )  # fmt: skip

    flaw = "engine-1 sent a completion in which a log-probability is 0.5, above 0"
    samples = [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()]
    reasons = {sample["reason"] for sample in samples if sample["fate"] == "failed"}
    assert done.code == 0, done.out + done.err
    assert reasons == {f"bad_logprobs: {flaw}"}
    assert flaw in done.out
