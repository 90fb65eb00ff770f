"""Ids, seeds and payload files, each alone."""

import pytest

from rubato.actors.samples.sample import (
    PayloadLost,
    file_payload,
    group_id,
    read_payload,
    remove_payloads,
    seed_of,
    split_id,
    sweep_payloads,
    trajectory_id,
)


def test_the_order_of_group_names_is_the_order_of_age():
    names = [group_id(n) for n in (0, 9, 10, 99, 100, 12_345)]

    assert names == sorted(names)
    assert split_id(trajectory_id(names[2], 7)) == (names[2], 7)


@pytest.mark.parametrize("text", ["", "g1", "g1.", "g1.x", "g1.-1"])
def test_other_texts_are_no_trajectory_ids(text):
    with pytest.raises(ValueError, match="no trajectory id"):
        split_id(text)


def test_seeds_follow_run_and_task_and_fit_31_bits():
    seeds = {(run, task): seed_of("train", run, task) for run in range(3) for task in range(50)}

    assert len(set(seeds.values())) == len(seeds)
    assert max(seeds.values()) < 2**31
    assert seed_of("train", 1, 1) == seeds[1, 1]
    assert seed_of("eval", 1, 5) == seed_of("eval", 2, 5) != seed_of("train", 1, 5)


def test_a_filed_payload_comes_back_by_its_digest(tmp_path):
    payload = bytes(range(256)) * 300

    digest = file_payload(tmp_path / "samples", "g1.0.1", payload)

    assert read_payload(tmp_path / "samples", "g1.0.1", digest) == payload
    assert [path.name for path in (tmp_path / "samples").iterdir()] == ["g1.0.1"]


def test_a_damaged_or_missing_payload_is_said_to_be_lost(tmp_path):
    digest = file_payload(tmp_path, "g1.0.1", b"x" * 100)
    (tmp_path / "g1.0.1").write_bytes(b"y" * 100)

    with pytest.raises(PayloadLost, match="does not match its digest"):
        read_payload(tmp_path, "g1.0.1", digest)
    (tmp_path / "g1.0.1").unlink()
    with pytest.raises(PayloadLost, match="can't be read"):
        read_payload(tmp_path, "g1.0.1", digest)


def test_the_files_of_all_attempts_of_a_sample_that_ended_go(tmp_path):
    for name in ("g1.0.1", "g1.0.2", "g1.0.1.00ff00ff.partial", "g1.1.1", "g10.0.1", "g1.00.1"):
        (tmp_path / name).write_bytes(b"")

    remove_payloads(tmp_path, ["g1.0", "g2.0"])
    remove_payloads(tmp_path / "missing", ["g1.0"])

    assert sorted(path.name for path in tmp_path.iterdir()) == ["g1.00.1", "g1.1.1", "g10.0.1"]


def test_files_that_nobody_waits_for_are_swept(tmp_path):
    for name in ("g1.0.1", "g1.0.2", "g1.0.2.00ff00ff.partial", "g2.0.1"):
        (tmp_path / name).write_bytes(b"")

    sweep_payloads(tmp_path, {"g1.0.2", "g3.0.1"})
    sweep_payloads(tmp_path / "missing", set())

    assert [path.name for path in tmp_path.iterdir()] == ["g1.0.2"]
