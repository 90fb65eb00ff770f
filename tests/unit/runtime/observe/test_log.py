"""Logs: one JSON object per event, secrets removed."""

import json
import logging
import warnings
from pathlib import Path

import pytest

from runtime.observe.log import configure, json_formatter, logger


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
