"""Jobs that train an adapter, of real processes: it arrives, it is saved, and an engine that drops it ends the run within one check."""

import json
import shutil
from pathlib import Path

import pytest

from rubato.actors.checkpoints.model_folder import read_tensors
from tests.jobs import LEARNING, rubato, write_model

pytestmark = pytest.mark.slow

DROPPING = """
from rubato.actors.adapters.low_rank import Stack
from rubato.actors.adapters.torch_engine import AdaptedTorchEngine, AdapterLoop


class Dropping(AdaptedTorchEngine):
    \"\"\"Says that it has every version of the adapter, and samples with the base model.\"\"\"

    async def update(self, version, weights, adapter=""):
        return await self.command(AdapterLoop.take, version, Stack({}), adapter)


class Silent(Dropping):
    \"\"\"Tells nothing of its tensors either.\"\"\"

    digest = None
"""

BAD_ENVS = Path(__file__).parent / "bad_envs.py"


@pytest.fixture
def launched(tmp_path):
    """`launched(engine, …)`: how a job that trains an adapter ended, and its rows."""
    (tmp_path / "dropping.py").write_text(DROPPING)
    model = write_model(tmp_path / "model")

    def run(engine, *overrides):
        config = LEARNING.replace("kind: scripted", f"kind: {engine}").replace("check: {enabled: false}", "check: {every: 3}")
        (tmp_path / "job.yaml").write_text(config.replace("env: {", f"env: {{class: '{BAD_ENVS}:Uneven', "))
        done = rubato(
            "launch", "job.yaml", "--run-dir", "run", f"model.path={model}", "run.steps=3", "train.lora={rank: 4, alpha: 8}",
            *overrides, cwd=tmp_path,
        )  # fmt: skip
        rows = tmp_path / "run" / "metrics.jsonl"
        return done, [json.loads(line) for line in rows.read_text().splitlines()] if rows.exists() else []

    return run


def test_an_adapter_is_trained_published_saved_evaluated_and_gone_on_with(launched, tmp_path):
    done, rows = launched("torch", "run.steps=2")
    assert done.code == 0, done.out + done.err
    again = rubato("launch", "job.yaml", "--run-dir", "run", "--resume", "run.steps=3", cwd=tmp_path)
    exported = rubato("export", "run", "--merged", "merged", cwd=tmp_path)
    evaluated = rubato("eval", "run", "--json", "eval.final_num_tasks=2", cwd=tmp_path)

    whole = (tmp_path / "model" / "model.safetensors").stat().st_size
    saved = tmp_path / "run" / "checkpoints" / "step_3"
    assert "trainer and engine agree" in done.out + done.err
    assert all(0 < row["weights/bytes"] < whole / 10 for row in rows)
    assert again.code == 0, again.out + again.err
    assert (saved / "adapter_model.safetensors").stat().st_size < whole / 10
    assert not (saved / "model.safetensors").exists()
    assert exported.code == 0, exported.err
    assert read_tensors(tmp_path / "merged").keys() == read_tensors(tmp_path / "model").keys()
    assert evaluated.code == 0, evaluated.err
    row = json.loads(evaluated.out)
    assert (row["version"], row["num"], row["failed"], row["model"]) == (3, 2, 0, str(saved))


@pytest.mark.parametrize(
    ("engine", "sentence"),
    [("Dropping", "sampled slices differ"), pytest.param("Silent", "but samples from the base model", marks=pytest.mark.nightly)],
)
def test_an_engine_that_drops_the_adapter_ends_the_run_within_one_check(launched, engine, sentence):
    done, rows = launched(f"dropping.py:{engine}", "train.lr=1e-5")  # far too little to be seen by the limit of the check

    assert done.code == 1
    assert "trainer and engine disagree: engine-1 says that it has" in done.err
    assert sentence in done.err
    assert len(rows) <= 1


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (
            ["train.lora={targets: [q_porj]}"],
            "no module of the model is called q_porj (did you mean q_proj?); there are down_proj, gate_proj",
        ),
        (["train.lora={start: model}"], "holds no adapter in peft's format: it has no adapter_config.json"),
        (["train.kind=scripted"], "lora has no effect with kind=scripted"),
    ],
)
def test_what_can_be_no_adapter_is_told_in_one_sentence_before_anything_starts(launched, tmp_path, overrides, sentence):
    overrides = [each.replace("start: model", f"start: {tmp_path / 'model'}") for each in overrides]

    done, _ = launched("torch", *overrides)

    assert done.code == 2
    assert sentence in done.err
    assert len(done.err.strip().splitlines()) == 1


@pytest.mark.nightly
def test_a_run_that_trained_the_whole_model_is_not_gone_on_with_as_an_adapter(launched, tmp_path):
    done, _ = launched("torch", "run.steps=1", "train.lora=null")
    assert done.code == 0, done.out + done.err

    again = rubato("launch", "job.yaml", "--run-dir", "run", "--resume", "run.steps=2", "train.lora={rank: 4}", cwd=tmp_path)

    assert again.code == 2
    assert "holds no adapter in peft's format" in again.err
    shutil.rmtree(tmp_path / "run")
