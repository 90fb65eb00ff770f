"""Loggers in a job as a user starts it."""

import json

import pytest

from rubato.runtime.errors import ExitCode
from tests.jobs import SMALL, rubato, write_model

pytestmark = pytest.mark.slow

OWN = """
class Raises:
    def start(self, run): ...
    def log(self, row):
        raise RuntimeError("the tracker is away")
    def close(self): ...
"""


@pytest.fixture
def place(tmp_path):
    (tmp_path / "small.yaml").write_text(SMALL)
    (tmp_path / "mine.py").write_text(OWN)
    write_model(tmp_path / "model")
    return tmp_path


def test_a_run_is_logged_offline_and_trains_on_beside_a_logger_that_raises(place):
    pytest.importorskip("wandb")
    loggers = "logging.loggers=[wandb, tensorboard, 'mine.py:Raises']"

    ended = rubato(
        "launch", "small.yaml", "--run-dir", "run", "run.steps=3", f"model.path={place / 'model'}", loggers,
        "logging.wandb_mode=offline", cwd=place,
    )  # fmt: skip

    assert ended.code == ExitCode.DONE, ended.err
    said = ended.out + ended.err
    assert "mine.py:Raises failed and gets no more rows: RuntimeError: the tracker is away" in said
    steps = [json.loads(line)["step"] for line in (place / "run" / "metrics.jsonl").read_text().splitlines()]
    assert steps == [1, 2, 3]
    assert list((place / "run" / "wandb").glob("offline-run-*/*.wandb")), said
    assert list((place / "run" / "tensorboard").glob("events.*")), said
    assert "failed" not in said.replace("mine.py:Raises failed", "")


def test_a_logger_that_is_none_is_refused_before_anything_starts(place):
    ended = rubato("launch", "small.yaml", "--run-dir", "run", "logging.loggers=[wandbb]", cwd=place)

    assert ended.code == ExitCode.REFUSED
    assert "Did you mean wandb?" in ended.err
    assert not (place / "run" / "config.yaml").exists()
