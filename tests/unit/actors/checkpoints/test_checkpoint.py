import errno

import pytest

from rubato.actors.checkpoints import checkpoint
from rubato.actors.checkpoints.checkpoint import CheckpointError

FILES = {"model.safetensors": b"weights", "optimizer.safetensors": b"moments"}


def test_a_checkpoint_reads_back_with_its_step_and_term(tmp_path):
    checkpoint.write(tmp_path / "step_5", FILES, step=5, term=2)

    manifest = checkpoint.check(tmp_path / "step_5")

    assert (manifest.step, manifest.term, set(manifest.files)) == (5, 2, {*FILES, checkpoint.RECEIPTS})


def test_the_newest_complete_checkpoint_is_found_and_a_truncated_one_passed_over(tmp_path):
    for step in (5, 10):
        checkpoint.write(tmp_path / f"step_{step}", FILES, step=step, term=1)
    (tmp_path / "step_10" / "model.safetensors").write_bytes(b"wei")

    found, passed_over = checkpoint.newest(tmp_path)

    assert found == tmp_path / "step_5"
    assert len(passed_over) == 1
    assert "model.safetensors is truncated" in passed_over[0]


@pytest.mark.parametrize("missing", ["manifest.json", "model.safetensors"])
def test_a_missing_file_is_one_sentence(tmp_path, missing):
    checkpoint.write(tmp_path / "step_1", FILES, step=1, term=1)
    (tmp_path / "step_1" / missing).unlink()

    with pytest.raises(CheckpointError, match=missing):
        checkpoint.check(tmp_path / "step_1")


@pytest.mark.parametrize(("number", "raised"), [(errno.ENOSPC, OSError), (errno.EIO, CheckpointError)])
def test_a_disk_that_refuses_keeps_the_previous_checkpoint_and_one_that_is_full_may_be_asked_again(tmp_path, monkeypatch, number, raised):
    checkpoint.write(tmp_path / "step_1", FILES, step=1, term=1)

    def full(_):
        raise OSError(number, "it refuses")

    monkeypatch.setattr(checkpoint.os, "fsync", full)
    with pytest.raises(raised, match="it refuses"):
        checkpoint.write(tmp_path / "step_2", FILES, step=2, term=1)

    found, passed_over = checkpoint.newest(tmp_path)
    assert (found, passed_over) == (tmp_path / "step_1", [])
    assert [p.name for p in tmp_path.iterdir()] == ["step_1"]


def test_old_checkpoints_are_pruned_by_step_and_not_by_name(tmp_path):
    for step in (2, 9, 10):
        checkpoint.write(tmp_path / f"step_{step}", FILES, step=step, term=1)

    checkpoint.prune(tmp_path, 2, term=1)

    assert sorted(p.name for p in tmp_path.iterdir()) == ["step_10", "step_9"]


def test_pruning_keeps_the_newest_and_clears_what_replaced_trainers_had_begun(tmp_path):
    for step in (5, 10, 15):
        checkpoint.write(tmp_path / f"step_{step}", {"a": b"x"}, step=step, term=1)
    newer = [".waiting_25.3.building", "waiting_20.3"]
    for name in (".step_20.building", ".step_15.replaced", "waiting_20.1", ".waiting_20.2.building", *newer):
        (tmp_path / name).mkdir()

    checkpoint.prune(tmp_path, keep=2, term=2)

    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*newer, "step_10", "step_15"])


def test_what_was_never_named_is_gone_for_whoever_would_name_it_later(tmp_path):
    checkpoint.write(tmp_path / "step_5", {"a": b"x"}, step=5, term=1)
    checkpoint.write(tmp_path / "waiting_10.1", {"a": b"y"}, step=10, term=1)

    checkpoint.drop_unnamed(tmp_path, term=2)

    with pytest.raises(FileNotFoundError):
        checkpoint.rename(tmp_path / "waiting_10.1", tmp_path / "step_10")
    assert [path.name for path in tmp_path.iterdir()] == ["step_5"]


def test_a_checkpoint_takes_the_place_of_another_only_if_it_is_there(tmp_path):
    checkpoint.write(tmp_path / "step_5", {"a": b"successor's"}, step=5, term=2)

    with pytest.raises(FileNotFoundError):  # the successor has pruned it
        checkpoint.rename(tmp_path / "waiting_5.1", tmp_path / "step_5")
    assert (tmp_path / "step_5" / "a").read_bytes() == b"successor's"

    checkpoint.write(tmp_path / "waiting_5.3", {"a": b"newer"}, step=5, term=3)
    checkpoint.rename(tmp_path / "waiting_5.3", tmp_path / "step_5")
    assert (tmp_path / "step_5" / "a").read_bytes() == b"newer"
    assert [path.name for path in tmp_path.iterdir()] == ["step_5"]


@pytest.mark.parametrize("name", ["step_5.bak", "step_", "step_x", "step_-1", "step_²"])
def test_a_folder_of_another_name_is_neither_loaded_nor_removed(tmp_path, name):
    (tmp_path / name).mkdir()
    for step in (5, 10):
        checkpoint.write(tmp_path / f"step_{step}", FILES, step=step, term=1)

    checkpoint.prune(tmp_path, keep=1, term=1)

    assert checkpoint.newest(tmp_path) == (tmp_path / "step_10", [])
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["step_10", name])


def test_a_trainer_of_an_older_term_names_no_checkpoint_and_takes_over_nothing(tmp_path):
    checkpoint.write(tmp_path / "waiting_5.1", FILES, step=5, term=1)
    checkpoint.take_over(tmp_path, 2)

    with pytest.raises(checkpoint.Replaced, match="term 2 has taken over from term 1"):
        checkpoint.name(tmp_path / "waiting_5.1", tmp_path / "step_5", 1)
    with pytest.raises(checkpoint.Replaced):
        checkpoint.take_over(tmp_path, 1)

    assert checkpoint.by_step(tmp_path) == []


def test_a_checkpoint_that_a_successor_removed_is_not_named(tmp_path):
    checkpoint.write(tmp_path / "waiting_5.1", FILES, step=5, term=1)
    checkpoint.drop_unnamed(tmp_path, 2)

    with pytest.raises(checkpoint.Replaced, match="is gone"):
        checkpoint.name(tmp_path / "waiting_5.1", tmp_path / "step_5", 1)


def test_what_a_newer_trainer_is_writing_is_not_pruned_by_one_that_wakes_late(tmp_path):
    checkpoint.write(tmp_path / "waiting_5.7", FILES, step=5, term=7)

    checkpoint.prune(tmp_path, 2, 3)

    checkpoint.name(tmp_path / "waiting_5.7", tmp_path / "step_5", 7)
    assert checkpoint.check(tmp_path / "step_5").step == 5


def test_receipts_are_those_of_the_newest_checkpoint_whose_receipts_are_intact(tmp_path):
    for step in (5, 10):
        checkpoint.write(tmp_path / f"step_{step}", FILES, step=step, term=1, receipts=[b"%d" % step])
    assert checkpoint.newest_receipts(tmp_path) == [b"10"]

    (tmp_path / "step_10" / checkpoint.RECEIPTS).write_bytes(b"damaged")

    assert checkpoint.newest_receipts(tmp_path) == [b"5"]
    assert checkpoint.newest_receipts(tmp_path / "nothing") == []
