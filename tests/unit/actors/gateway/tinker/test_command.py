"""`rubato tinker CONFIG`: which job it makes of a config."""

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from rubato.actors.gateway.tinker.command import load
from rubato.runtime.errors import ConfigError
from tests.jobs import clean_environment

CONFIGS = Path(__file__).parents[5] / "configs"


def written(folder, **sections):
    path = folder / "job.yaml"
    path.write_text(yaml.safe_dump(sections))
    return path


def test_of_a_training_job_engines_and_the_model_are_taken_and_one_line_says_what_is_not():
    config = load(CONFIGS / "quickstart.yaml", ["actors.trainer.restarts=7"])
    assert sorted(config.actors) == ["engine", "llm_proxy", "tinker", "trainer"]
    assert config.actors["engine"].count == 2
    assert config.actors["trainer"].restarts == 7
    assert config.section("train").lora.rank == 32
    assert config.section("engine").num_slots == 128
    (line,) = config.notes
    assert line.startswith("left out, since a server has no use for it: env_manager, fabric_controller")
    assert "staleness" in line


def test_the_model_is_the_folder_that_its_name_is_given(tmp_path):
    engine = {"engine": {"class": "rubato.actors.engines.worker:EngineWorker"}}
    config = load(written(tmp_path, actors=engine, tinker={"models": {"Qwen/Qwen3-8B": "/models/q"}}))
    assert config.section("model").path == "/models/q"
    assert config.notes == ()


def test_a_config_that_names_a_server_is_taken_as_it_is():
    assert load(CONFIGS / "tinker.yaml").notes == ()


@pytest.mark.parametrize(
    ("sections", "why"),
    [
        ({}, "names no actors"),
        ({"actors": {"engine": {"class": "rubato.actors.engines.worker:EngineWorker"}}, "tinkr": {}}, "Did you mean tinker"),
        (
            {"actors": {"engine": {"class": "rubato.actors.engines.worker:EngineWorker"}}, "tinker": {"models": {"a b": "x"}}},
            "'a b' is no name of a model",
        ),
        (
            {
                "actors": {"engine": {"class": "rubato.actors.engines.worker:EngineWorker"}},
                "model": {"path": "/models/a"},
                "tinker": {"models": {"q": "/models/b"}},
            },
            "a job has one base model",
        ),
    ],
)
def test_a_config_of_which_no_server_can_be_made_is_refused(tmp_path, sections, why):
    with pytest.raises(ConfigError, match=why):
        load(written(tmp_path, **sections))


def test_a_job_without_a_server_loads_nothing_of_it():
    code = (
        "import sys; from rubato.runtime.config.compose import load; load(sys.argv[1]); "
        "print([m for m in sys.modules if 'tinker' in m or m.startswith('google.protobuf')])"
    )
    words = [sys.executable, "-c", code, str(CONFIGS / "quickstart_lora.yaml")]
    told = subprocess.run(words, env=clean_environment(), capture_output=True, text=True, check=True).stdout
    assert told.strip() == "[]"
