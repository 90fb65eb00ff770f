"""The job that an evaluation is made of."""

import pytest
import yaml

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


def test_an_adapter_is_evaluated_over_the_base_model_of_its_run_and_needs_a_config_that_trains_one(tmp_path):
    (tmp_path / "job.yaml").write_text(LEARNING)
    saved = tmp_path / "run" / "checkpoints" / "step_2"
    saved.mkdir(parents=True)
    (saved / "adapter_config.json").write_text("{}")
    with_lora = ["train.lora={rank: 4, start: elsewhere}", "model.path=base"]

    made = yaml.safe_load(job_of(tmp_path / "job.yaml", with_lora, [str(saved)]))

    assert made["model"]["path"] == str(tmp_path / "run" / "base")
    assert (made["train"]["lora"]["rank"], made["train"]["lora"]["start"]) == (4, "")
    assert yaml.safe_load(job_of(tmp_path / "job.yaml", with_lora, [str(tmp_path)]))["train"]["lora"] is None
    with pytest.raises(LaunchError, match=r"holds an adapter, and the config has no train.lora: give the config of its run"):
        job_of(tmp_path / "job.yaml", ["model.path=base"], [str(saved)])
