"""The comparison of redundancy: nothing that keeps its slot is lost, and what is killed for being late is what is slow."""

import json

import pytest

from tools.bench import redundancy


@pytest.fixture(autouse=True)
def _short(monkeypatch):
    monkeypatch.setattr(redundancy, "STEPS", 12)
    monkeypatch.setattr(redundancy, "WARM", 2)
    monkeypatch.setattr(redundancy, "BATCH_GROUPS", 8)


@pytest.mark.parametrize("name", redundancy.ARMS)
def test_every_arm_trains_whole_batches_each_trajectory_once(name):
    arm = redundancy.arm_of(name, 1)

    arm.run()

    trained = [trajectory for _, batch in arm.batches for trajectory in batch]
    assert len(arm.batches) == 14
    assert len(trained) == len(set(trained)) == 14 * 8 * redundancy.GROUP_SIZE
    assert [at for at, _ in arm.batches] == sorted(at for at, _ in arm.batches)


def test_groups_that_keep_their_slots_train_all_that_began_but_for_the_slots_of_the_end():
    arm = redundancy.arm_of("surplus", 2)

    arm.run()

    trained = {trajectory for _, batch in arm.batches for trajectory in batch}
    assert len(arm.drawn) - len(trained) <= 3 * 8 * redundancy.GROUP_SIZE
    assert set(sorted(arm.drawn)[: 8 * redundancy.GROUP_SIZE]) <= trained


def test_first_n_discards_what_is_slow():
    found = redundancy.figures(redundancy.arm_of("first_n", 1))

    assert found["slow_trained_frac"] < found["slow_begun_frac"] / 2
    assert found["length_bias"] < 0.97
    assert found["untrained_frac"] > 0.15


def test_a_killed_rollout_frees_its_environment_at_once(monkeypatch):
    monkeypatch.setattr(redundancy, "SLOW", 1e6)
    monkeypatch.setattr(redundancy, "SLOW_SHARE", 0.01)
    arm = redundancy.arm_of("first_n", 1)

    arm.run()

    assert arm.batches[-1][0] < 1e6


def test_the_json_has_every_arm_of_each_bound_and_says_that_it_is_simulated(tmp_path, capsys):
    assert redundancy.main(["--json", str(tmp_path / "found.json")]) == 0

    found = json.loads((tmp_path / "found.json").read_text())
    assert found["simulated"]
    assert [point["alpha"] for point in found["points"]] == [1, 2]
    for point in found["points"]:
        assert point["first_n"]["gain"] == point["none"]["batch_s"] / point["first_n"]["batch_s"]
        assert set(redundancy.ARMS) < set(point)
    assert "simulated" in capsys.readouterr().out


def test_a_file_that_can_not_be_written_is_told_before_anything_runs(tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        redundancy.main(["--json", str(tmp_path)])

    assert ended.value.code == 2
    assert "Is a directory" in capsys.readouterr().err
