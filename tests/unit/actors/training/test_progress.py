import json
import math
import os
import socket

import pytest

from actors.training.publishing import Rows, batch_metrics, cpu_used, others_metrics
from runtime.registry import ActorRecord


def test_rows_after_the_checkpoint_and_a_torn_line_are_forgotten(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "time/wall_s": 2.0}\n{"step": 2, "time/wall_s": 4.0}\n{"step": 3}\n{"st')

    rows = Rows(path)
    rows.truncate(2)
    rows.append({"step": 3, "reward/mean": 0.5})

    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2, 3]
    assert rows.wall_s == 4.0


@pytest.mark.parametrize("damage", [b'{"step": 2, "time/wa', b"[]", b"{}", b"\xff\x00", b'{"step": "two"}'], ids=repr)
def test_damaged_lines_are_left_out_and_counted(tmp_path, damage):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n' + damage + b'\n{"step": 3}\n{"torn')

    assert Rows(path).truncate(9) == 1

    assert path.read_bytes() == b'{"step": 1}\n{"step": 3}\n'


def test_a_figure_that_is_not_finite_is_left_out(tmp_path):
    rows = Rows(tmp_path / "metrics.jsonl")

    rows.append({"step": 1, "policy/kl": math.nan, "optim/lr": 0.1})

    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {"step": 1, "optim/lr": 0.1}


def test_ages_count_from_the_version_the_update_starts_from(trajectory):
    group = [trajectory([1, 2], [0, 1], version=version) for version in (3, 4)]

    found = batch_metrics([group], 5)

    assert found["staleness/max"] == 1.0
    assert found["staleness/mean"] == pytest.approx(0.5)
    assert found["rollout/len_mean"] == 2.0


def record(name, **fields) -> ActorRecord:
    role = name.rpartition("-")[0]
    return ActorRecord(
        name, role, "", 1, **({"pid": os.getpid(), "host": socket.gethostname(), "state": "ready"} | fields)
    )


def test_cpu_seconds_are_of_this_host_alone():
    used = cpu_used([record("engine-1"), record("engine-2", host="elsewhere")])

    assert used["cpu/engine-1"] > 0
    assert "cpu/engine-2" not in used
    assert used["cpu/host"] >= used["cpu/engine-1"] * 0.9
    assert used["cpu/cores"] == os.cpu_count()


def test_a_row_has_the_longest_of_the_engines_pulls():
    engines = [record(f"engine-{i}", metrics={"weights/transfer_s_p50": i / 100}) for i in (1, 2)]

    assert others_metrics(engines)["weights/transfer_s"] == 0.02
