"""What the lab of racks makes of a config, of rows and of several runs."""

from pathlib import Path

import pytest

from rubato.runtime.config.compose import load
from rubato.runtime.errors import ConfigError
from tools import fabric_lab
from tools.fabric_lab import MODES, figures, roles, summary, table

CONFIG = Path(__file__).parents[3] / "configs" / "lab_racks.yaml"
FOUR = "fabric.racks={a: [10.203.6.1], b: [10.203.6.2], c: [10.203.6.3], d: [10.203.6.4]}"


@pytest.mark.parametrize("mode", MODES)
def test_the_config_of_the_lab_is_a_job_in_every_mode(mode):
    config = load(CONFIG, [MODES[mode], "fabric.testbed=lab"])

    assert {"trainer_rank", "sample_buffer", "env_manager", "orchestrator", "fabric_controller"} <= set(config.actors)
    assert list(roles(config).values()) == ["trainer_rank", "engine", "engine"]


def test_racks_join_with_a_rank_each_until_the_mesh_has_all_and_then_with_engines():
    assert roles(load(CONFIG, [FOUR])) == {"b": "trainer_rank", "c": "engine", "d": "engine"}
    assert roles(load(CONFIG, [FOUR, "train.mesh.replicate=3"])) == {"b": "trainer_rank", "c": "trainer_rank", "d": "engine"}


def test_too_few_racks_for_ranks_and_an_engine_are_refused_in_a_sentence():
    with pytest.raises(ConfigError, match=r"^fabric.racks has 4 racks, and the lab needs 5: one to launch in, 3 for ranks, one for an eng"):
        roles(load(CONFIG, [FOUR, "train.mesh.replicate=4"]))


def test_a_job_that_other_racks_could_not_join_is_refused_in_a_sentence():
    with pytest.raises(ConfigError, match=r"^bus.host is .*, and the lab launches in rack-0: set it to 10.203.6.1.$"):
        roles(load(CONFIG, ["bus.host=10.203.6.2"]))


def test_figures_are_of_the_steps_after_the_first_row_and_of_what_sums_grew_by():
    rows = [
        {"step": 4, "time/step": 90.0, "fabric/hidden_s": 1.0, "fabric/reconfigurations": 8},
        {"step": 5, "time/step": 4.0, "time/train": 1.0, "fabric/hidden_s": 1.5, "fabric/reconfigurations": 10},
        {"step": 6, "time/step": 6.0, "time/train": 2.0, "fabric/hidden_s": 2.0, "fabric/reconfigurations": 12},
    ]

    found = figures(rows)

    assert (found["step_s"], found["train_s"]) == (5.0, 1.5)
    assert (found["hidden_s"], found["changes"], found["exposed_s"]) == (0.5, 2.0, 0.0)


def test_runs_are_told_with_their_spread_and_beside_the_controllers():
    row = dict.fromkeys(("train_s", "sync_s", "wait_s", "exposed_s", "hidden_s"), 1.0)
    runs = {
        mode: [row | {"step_s": s, "sent_mb": {}} for s in seconds] for mode, seconds in (("controller", (4, 6)), ("electrical", (20, 20)))
    }

    modes = {mode: summary(found) for mode, found in runs.items()}

    assert modes["controller"]["step_s"] == {"mean": 5, "sd": 1.4142, "least": 4, "most": 6}
    assert "sent_mb" not in modes["controller"]
    told = table(modes).splitlines()
    assert "5.00 (4.00 to 6.00)" in told[1]
    assert told[-1] == "a step takes 4.00 times as long with electrical links alone as with the controller's circuits"


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("--repetitions", "0"), "'0' is no number from 1 to 100"),
        (("--steps", "9" * 30), "is no number from 1 to 10000"),
        (("--modes", "light"), "invalid choice: 'light'"),
    ],
)
def test_bad_numbers_and_modes_are_refused_in_a_sentence(words, why, capsys):
    with pytest.raises(SystemExit) as ended:
        fabric_lab.main([str(CONFIG), *words])

    assert ended.value.code == 2
    assert why in capsys.readouterr().err


def test_a_folder_that_is_there_is_refused_before_anything_starts(tmp_path, capsys):
    assert fabric_lab.main([str(CONFIG), "--run-dir", str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"{tmp_path} exists. Give another --run-dir.\n"
