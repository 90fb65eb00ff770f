"""Logs: one JSON object per event, secrets removed."""

import errno
import json
import logging
import os
import warnings
from pathlib import Path

import pytest

from rubato.runtime.observe.log import configure, json_formatter, logger
from rubato.runtime.observe.trace import append_whole


@pytest.fixture
def lines(tmp_path):
    """Configures logging into a file for one test and reads what arrived."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    path = tmp_path / "logs" / "engine-1.jsonl"
    configure(path, actor="engine-1")

    yield lambda: [json.loads(line) for line in path.read_text().splitlines()]

    logging.captureWarnings(False)
    for handler in list(root.handlers):
        root.removeHandler(handler)
        handler.close()
    for handler in handlers:
        root.addHandler(handler)
    root.setLevel(level)


def test_an_event_is_one_json_line_that_names_actor_level_and_logger(lines):
    logger("engines.worker").bind(incarnation=7).info("swapped", version=3, path=Path("/model"))

    (line,) = lines()
    assert line.pop("t").endswith("Z")
    assert line == {
        "level": "info",
        "logger": "rubato.engines.worker",
        "actor": "engine-1",
        "event": "swapped",
        "incarnation": 7,
        "version": 3,
        "path": "/model",
    }


def test_logging_and_warnings_of_other_libraries_arrive_too(lines):
    logging.getLogger("other").warning("hello %s", "there")
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.warn("old", UserWarning, stacklevel=1)

    first, second = lines()
    assert (first["logger"], first["event"]) == ("other", "hello there")
    assert second["logger"] == "py.warnings"


def test_secrets_never_reach_the_file(lines):
    logger("launch").info("state", password="p4ss", url="redis://user:p4ss@host:1/0", nested={"api_key": "p4ss"})
    logging.getLogger("redis").error("connecting to redis://:p4ss@host failed")
    logging.getLogger("redis").error("connecting to redis+sentinel://host/s?sentinel_password=p4ss&db=1 failed")

    assert "p4ss" not in json.dumps(lines())
    assert lines()[0]["url"] == "redis://***@host:1/0"


def test_token_counts_are_no_secrets(lines):
    logger("engine").info("generated", num_tokens=12)

    assert lines()[0]["num_tokens"] == 12


def test_an_exception_is_logged_with_its_traceback(lines):
    try:
        raise KeyError("goal")
    except KeyError:
        logger("env").exception("reset_failed")

    assert "KeyError: 'goal'" in lines()[0]["exception"]


def test_debug_events_are_left_out_by_default(lines):
    logger("env").debug("noise")

    assert lines() == []


def test_the_formatter_needs_no_configuration():
    record = logging.LogRecord("x", logging.INFO, __file__, 1, "plain", (), None)

    assert json.loads(json_formatter("a-1").format(record))["event"] == "plain"


def test_a_line_that_its_disk_refuses_is_dropped_counted_and_printed_nowhere(lines, monkeypatch, capfd):
    def full(fd, line):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as disk:
        disk.setattr("rubato.runtime.observe.log.append_whole", full)
        for number in range(3):
            logger("engine").info("lost", number=number)
    logger("engine").info("kept")

    said = capfd.readouterr()
    assert [line["event"] for line in lines()] == ["3 log lines before this one were dropped: their disk refused them", "kept"]
    assert said.out + said.err == ""


def test_what_a_disk_takes_half_of_is_taken_back(tmp_path, monkeypatch):
    path, write = tmp_path / "rows", os.write
    path.write_bytes(b"whole\n")

    def half(fd, content):
        if len(content) < 8:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(fd, content[: len(content) // 2])

    monkeypatch.setattr(os, "write", half)
    with path.open("ab") as file, pytest.raises(OSError, match="No space"):
        append_whole(file.fileno(), b"a line that is torn\n")

    assert path.read_bytes() == b"whole\n"
