import json

from runtime.monitor.source import RowTail, log_tail, read_config


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
