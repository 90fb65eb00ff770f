"""The job that an evaluation is made of."""

import json

import numpy
import pytest
import yaml
from safetensors.numpy import save

from rubato.actors.adapters import shapes
from rubato.actors.report.evaluate import find_models, job_of
from rubato.runtime.errors import LaunchError
from tests.jobs import LEARNING, SMALL


def test_an_evaluation_has_the_engines_of_the_config_s_pools_and_no_trainer_s(tmp_path):
    tree = yaml.safe_load(SMALL)
    pools = {"decode": {"count": 2, "set": {"engine.num_slots": 64}}}
    tree["actors"]["engine"]["pools"] = pools
    tree["actors"]["trainer"]["pools"] = {"train": {"gpus": 1}}
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(tree))

    made = yaml.safe_load(job_of(tmp_path / "job.yaml", [], [str(tmp_path / "model")]))["actors"]

    assert made["engine"]["pools"]["decode"].items() >= pools["decode"].items()
    assert (made["trainer"]["pools"], made["trainer"]["count"]) == ({}, 1)


def test_a_name_at_the_hub_is_a_model_unless_its_owner_is_a_folder_here(tmp_path, monkeypatch):
    (tmp_path / "runs").mkdir()
    monkeypatch.chdir(tmp_path)

    assert find_models("acme/tiny", every=False) == ["acme/tiny"]
    with pytest.raises(LaunchError, match="runs/gone is no folder"):
        find_models("runs/gone", every=False)


@pytest.fixture
def adapter(tmp_path):
    """`adapter(folder, base)`: writes an adapter of rank 4 in peft's format, whose base model is said to be there."""

    def make(folder, base):
        folder.mkdir(parents=True)
        told = {"peft_type": "LORA", "r": 4, "lora_alpha": 6, "base_model_name_or_path": base, "target_modules": "all-linear"}
        (folder / "adapter_config.json").write_text(json.dumps(told))
        names = [f"{shapes.PREFIX}model.layers.0.mlp.{name}" for name in ("up_proj", "down_proj")]
        tensors = {
            f"{name}{kind}": numpy.zeros(shape, "float32") for name in names for kind, shape in ((shapes.DOWN, (4, 8)), (shapes.UP, (8, 4)))
        }
        (folder / shapes.WEIGHTS).write_bytes(save(tensors))
        return folder

    return make


def test_an_adapter_of_a_run_is_evaluated_over_the_base_model_of_its_run(tmp_path, adapter):
    (tmp_path / "job.yaml").write_text(LEARNING)
    saved = adapter(tmp_path / "run" / "checkpoints" / "step_2", "/nowhere")
    (saved / "manifest.json").touch()

    made = yaml.safe_load(job_of(tmp_path / "job.yaml", ["train.lora={rank: 8, start: elsewhere}", "model.path=base"], [str(saved)]))

    assert made["model"]["path"] == str(tmp_path / "run" / "base")
    assert (made["train"]["lora"]["rank"], made["train"]["lora"]["start"]) == (8, "")
    assert yaml.safe_load(job_of(tmp_path / "job.yaml", ["train.lora.rank=4"], [str(tmp_path)]))["train"]["lora"] is None


@pytest.mark.parametrize("lora", [[], ["train.lora.rank=8"]])
def test_an_adapter_of_no_run_is_evaluated_as_it_says_itself(tmp_path, monkeypatch, adapter, lora):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.yaml").write_text(LEARNING)
    (tmp_path / "base").mkdir()

    made = yaml.safe_load(job_of(tmp_path / "job.yaml", lora, [str(adapter(tmp_path / "adapter", "base"))]))

    assert made["model"]["path"] == str(tmp_path / "base")
    assert (made["train"]["lora"]["rank"], made["train"]["lora"]["alpha"]) == (4, 6.0)
    assert set(made["train"]["lora"]["targets"]) == {"model.layers.0.mlp.up_proj", "model.layers.0.mlp.down_proj"}


@pytest.mark.parametrize(
    ("said", "words", "path"),
    [("acme/tiny", [], "acme/tiny"), ("/gone", ["model.path={folder}"], "{folder}"), (None, ["model.path=acme/tiny@v1"], "acme/tiny@v1")],
)
def test_the_base_model_of_an_adapter_may_be_at_the_hub_or_be_named(tmp_path, adapter, said, words, path):
    (tmp_path / "job.yaml").write_text(LEARNING)
    words = [word.format(folder=tmp_path) for word in words]

    made = yaml.safe_load(job_of(tmp_path / "job.yaml", words, [str(adapter(tmp_path / "adapter", said))]))

    assert made["model"]["path"] == path.format(folder=tmp_path)


@pytest.mark.parametrize(
    ("said", "told"), [("/gone/model", "/gone/model"), (None, "of which it says nothing"), ("", "of which it says nothing")]
)
def test_a_base_model_that_is_not_there_is_asked_for(tmp_path, adapter, said, told):
    (tmp_path / "job.yaml").write_text(LEARNING)

    with pytest.raises(LaunchError, match=f"the base model of the adapter in .*, {told}, is not there: name it with model.path"):
        job_of(tmp_path / "job.yaml", [], [str(adapter(tmp_path / "adapter", said))])


def test_a_folder_that_is_no_adapter_is_refused_before_a_job_is_made_of_it(tmp_path, adapter):
    folder = adapter(tmp_path / "adapter", "base")
    (folder / shapes.WEIGHTS).write_bytes(b"no tensors")

    with pytest.raises(LaunchError, match=r"^the adapter in .* can't be read: .* is not a safetensors image"):
        find_models(str(folder), every=False)
