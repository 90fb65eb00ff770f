import json

import pytest

from rubato.runtime.monitor.source import RowTail, RunSource, log_tail, read_config

ADVISED = {
    "time/step": 2.0, "time/wait_for_batch": 1.8, "time/train": 0.1, "perf/samples_s": 8.0, "rollout/wall_s_mean": 2.0,
    "rollout/env_frac": 0.25, "rollout/room": 16.0, "rollout/slots": 4.0, "weights/pause_s": 0.5, "idle/engine-1": 0.0,
    "idle/engine-2": 0.0, "idle/env_manager-1": 0.75,
}  # fmt: skip


def write(path, *rows, end="\n"):
    with path.open("a") as file:
        file.write("\n".join(json.dumps(row) for row in rows) + end)


def test_rows_are_read_as_they_come_and_a_torn_line_waits(tmp_path):
    path = tmp_path / "metrics.jsonl"
    tail = RowTail(path)
    assert tail.read() == []

    write(path, {"step": 1, "a": 0.5, "text": "no number", "flag": True}, {"step": 2}, end='\n{"step": 3')
    first = tail.read()
    with path.open("a") as file:
        file.write(', "a": 4}\n')

    assert first == [{"step": 1, "a": 0.5}, {"step": 2}]
    assert tail.read()[-1] == {"step": 3, "a": 4}


def test_steps_that_a_resumed_run_repeats_replace_the_old_ones(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(path, {"step": 1}, {"step": 2, "a": 1}, {"step": 3, "a": 1}, {"step": 2, "a": 2})

    assert RowTail(path).read() == [{"step": 1}, {"step": 2, "a": 2}]


def test_a_file_that_was_begun_anew_is_read_from_its_start(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(path, {"step": 1, "a": 1}, {"step": 2, "a": 1})
    tail = RowTail(path)
    tail.read()

    path.unlink()
    write(path, {"step": 1})

    assert tail.read() == [{"step": 1}]


def test_a_damaged_line_is_left_out(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\nnot json\n[1]\n{"step": 2}\n')

    assert RowTail(path).read() == [{"step": 1}, {"step": 2}]


def test_a_log_is_told_as_time_event_and_fields(tmp_path):
    path = tmp_path / "node-1.jsonl"
    write(
        path,
        {"t": "2025-01-01T00:00:31.5Z", "level": "info", "logger": "x", "actor": "node-1", "event": "ready"},
        {"t": "2025-01-01T00:00:32Z", "level": "warning", "actor": "node-1", "event": "died", "how": "signal 9"},
    )

    assert log_tail(path, 1) == ["00:00:32 warning: died how=signal 9"]
    assert log_tail(path, 5)[0] == "00:00:31 ready"
    assert log_tail(tmp_path / "none.jsonl", 5) == []


def test_a_config_that_is_missing_or_damaged_is_empty(tmp_path):
    path = tmp_path / "config.yaml"
    assert read_config(path) == {}

    path.write_text("a: {b: 1}\n")
    assert read_config(path) == {"a": {"b": 1}}

    damaged = tmp_path / "damaged.yaml"
    damaged.write_text("a: [")
    assert read_config(damaged) == {}


@pytest.mark.parametrize(
    ("target", "told"),
    [
        ("rubato.actors.report.advice:advice_metrics", {"advice/generation-bound/engine_2_more": pytest.approx(0.6)}),
        ("nowhere.at_all:advice", {}),
        ("", {}),
    ],
)
async def test_advice_is_made_of_the_rows_by_the_function_that_the_config_names(tmp_path, target, told):
    write(tmp_path / "metrics.jsonl", *({"step": step} | ADVISED for step in (1, 2)))
    (tmp_path / "config.yaml").write_text(json.dumps({"report": {"advice": target}, "staleness": {"alpha": 1}}))
    source = RunSource(tmp_path)

    view = await source.read()
    await source.close()

    found = view.shown["advice"]
    assert {name: found[name] for name in told} == told
    assert bool(found) == bool(told)
