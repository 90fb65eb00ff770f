"""The job that an evaluation is made of."""

import yaml

from actors.report.evaluate import job_of
from tests.jobs import SMALL


def test_an_evaluation_has_the_engines_of_the_config_s_pools_and_no_trainer_s(tmp_path):
    tree = yaml.safe_load(SMALL)
    pools = {"decode": {"count": 2, "set": {"engine.num_slots": 64}}}
    tree["actors"]["engine"]["pools"] = pools
    tree["actors"]["trainer"]["pools"] = {"train": {"gpus": 1}}
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(tree))

    made = yaml.safe_load(job_of(tmp_path / "job.yaml", [], [tmp_path / "model"]))["actors"]

    assert made["engine"]["pools"]["decode"].items() >= pools["decode"].items()
    assert (made["trainer"]["pools"], made["trainer"]["count"]) == ({}, 1)
