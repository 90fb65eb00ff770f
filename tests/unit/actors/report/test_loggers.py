"""Loggers beside metrics.jsonl: each gets every row; one that fails or hangs costs its own rows alone."""

import json
import threading
import urllib.request

import pytest
from pydantic import ValidationError

from rubato.actors.config import LoggingSection
from rubato.actors.report.loggers import WAITING, check_loggers, start_loggers
from rubato.runtime.actor import RunInfo
from rubato.runtime.errors import ConfigError

ROWS = [{"step": 1, "reward/mean": 0.25}, {"step": 2, "reward/mean": 0.5, "policy/loss": -0.125}]
ALIKE = {"env/a-b": 0.75, "env/a_b": 1.5}

OWN = """
import json

class Lines:
    def __init__(self, path):
        self.path = path
    def start(self, run):
        self.file = open(self.path, "w")
        print(json.dumps([run.name, run.step, run.config["run"]["name"]]), file=self.file)
    def log(self, row):
        print(json.dumps(row), file=self.file)
    def close(self):
        print('"closed"', file=self.file)
        self.file.close()

class Raises(Lines):
    def log(self, row):
        raise OSError(28, "No space left on device", self.path)

class NoLog:
    def start(self, run): ...
    def close(self): ...
"""


@pytest.fixture
def run(tmp_path):
    """A run whose folder lies beside a module of the user's."""
    (tmp_path / "mine.py").write_text(OWN)
    folder = tmp_path / "run-7"
    folder.mkdir()
    (folder / "config.yaml").write_text("run: {name: seven}\n")
    return RunInfo("r7", folder, seed=1, steps=9)


def log(section, run, *, step=0, rows=ROWS):
    """Log `rows` and close; returns what was told."""
    told = []
    loggers = start_loggers(section, run, step, told.append)
    for row in rows:
        loggers.log(row)
    loggers.close()
    return told


def test_a_class_of_ones_own_gets_the_run_and_every_row(run):
    path = run.folder.parent / "lines"
    section = LoggingSection(loggers=[f"{run.folder.parent}/mine.py:Lines"], kwargs={"path": str(path)})

    assert log(section, run, step=3) == []

    assert [json.loads(line) for line in path.read_text().splitlines()] == [["run-7", 3, "seven"], *ROWS, "closed"]


def test_a_logger_hears_no_password_of_a_url(run):
    (run.folder / "config.yaml").write_text("run: {name: 's3://key:hunter2@bucket/run'}\n")
    path = run.folder.parent / "lines"
    section = LoggingSection(loggers=[f"{run.folder.parent}/mine.py:Lines"], kwargs={"path": str(path)})

    assert log(section, run) == []

    assert json.loads(path.read_text().splitlines()[0])[2] == "s3://***@bucket/run"


def test_a_logger_that_raises_is_told_once_and_others_go_on(run):
    path = run.folder.parent / "lines"
    own = [f"{run.folder.parent}/mine.py:{name}" for name in ("Raises", "Lines")]
    section = LoggingSection(loggers=own, kwargs={"path": str(path)})

    told = log(section, run)

    assert len(told) == 1
    assert "Raises failed and gets no more rows: OSError: [Errno 28] No space left on device" in told[0]
    assert path.read_text().splitlines()[-1] == '"closed"'


def test_a_logger_that_hangs_holds_up_nothing_and_loses_rows_with_a_word(run, monkeypatch):
    monkeypatch.setattr("rubato.actors.report.loggers.START_S", 0.05)
    monkeypatch.setattr("rubato.actors.report.loggers.CLOSE_S", 0.05)
    freed = threading.Event()

    class Hangs:
        def start(self, run):
            freed.wait(60)

        def log(self, row): ...

        def close(self): ...

    monkeypatch.setattr("rubato.actors.report.loggers._loaded", lambda name, section: Hangs())
    try:
        told = log(LoggingSection(loggers=["mine.py:Hangs"]), run, rows=ROWS[:1] * (WAITING + 9))
    finally:
        freed.set()

    assert told == [
        f"the logger mine.py:Hangs is {WAITING} rows behind: rows are left out until it catches up",
        "the logger mine.py:Hangs did not end within 0.05 s: its last rows may be missing",
    ]


def test_a_run_that_ends_waits_for_a_logger_that_is_still_starting(run, monkeypatch):
    monkeypatch.setattr("rubato.actors.report.loggers.CLOSE_S", 0.05)
    loaded, taken = threading.Event(), []

    class LoadsLong:
        def start(self, run):
            assert loaded.wait(60)

        def log(self, row):
            taken.append(row)

        def close(self): ...

    monkeypatch.setattr("rubato.actors.report.loggers._loaded", lambda name, section: LoadsLong())
    told = []
    loggers = start_loggers(LoggingSection(loggers=["mine.py:LoadsLong"]), run, 0, told.append)
    for row in ROWS:
        loggers.log(row)
    closing = threading.Thread(target=loggers.close)
    closing.start()
    closing.join(0.5)
    assert closing.is_alive()
    monkeypatch.setattr("rubato.actors.report.loggers.CLOSE_S", 60.0)
    loaded.set()
    closing.join(60)

    assert (taken, told) == (ROWS, [])


def test_tensorboard_reads_the_rows_back(run):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")

    assert log(LoggingSection(loggers=["tensorboard"]), run) == []

    events = accumulator.EventAccumulator(str(run.folder / "tensorboard")).Reload()
    assert [(e.step, e.value) for e in events.Scalars("reward/mean")] == [(1, 0.25), (2, 0.5)]
    assert [(e.step, e.value) for e in events.Scalars("policy/loss")] == [(2, -0.125)]


@pytest.fixture
def endpoint(run):
    """Port of a Prometheus endpoint that has taken all rows."""
    pytest.importorskip("prometheus_client")
    loggers = start_loggers(LoggingSection(loggers=["prometheus"], prometheus_listen="127.0.0.1:0"), run, 0, pytest.fail)
    logger, taken = loggers._threads[0]._logger, threading.Event()
    take = logger.log
    logger.log = lambda row: (take(row), taken.set() if row["step"] == 2 else None)
    for row in (ALIKE | ROWS[0], ROWS[1]):
        loggers.log(row)
    assert taken.wait(30)
    yield logger.port
    loggers.close()


def test_prometheus_serves_the_newest_row(endpoint):
    with urllib.request.urlopen(f"http://127.0.0.1:{endpoint}/metrics", timeout=30) as reply:
        text = reply.read().decode()

    assert 'rubato_reward_mean{run="run-7"} 0.5' in text
    assert 'rubato_policy_loss{run="run-7"} -0.125' in text
    assert 'rubato_env_a_b{run="run-7"} 0.75' in text
    assert 'rubato_env_a_b_{run="run-7"} 1.5' in text


def test_a_port_that_is_taken_is_told_and_nothing_else_ends(endpoint, run):
    section = LoggingSection(loggers=["prometheus"], prometheus_listen=f"127.0.0.1:{endpoint}")

    told = log(section, run)

    assert len(told) == 1
    assert "prometheus failed and gets no more rows: OSError" in told[0]


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"loggers": ["tensorbord"]}, "'tensorbord' is none of tensorboard, wandb, prometheus, and no path/to/file.py:Class. Did you mean tensorboard?"),
        ({"prometheus_listen": "9108"}, "'9108' must be a host and a port, like 127.0.0.1:7788 or [::1]:7788"),
    ],
)  # fmt: skip
def test_what_no_logger_can_be_is_refused(given, sentence):
    with pytest.raises(ValidationError) as refused:
        LoggingSection(**given)

    assert sentence in refused.value.errors()[0]["msg"]


def test_a_logger_whose_package_is_missing_names_the_extra(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)

    with pytest.raises(ConfigError, match=r"has wandb, but wandb is not installed\. Install it with: pip install -e '\.\[wandb\]'"):
        check_loggers(LoggingSection(loggers=["wandb"]))


@pytest.mark.parametrize(
    ("name", "kwargs", "sentence"),
    [
        ("NoLog", {}, r"mine.py:NoLog has no log: a logger has start, log and close"),
        ("Lines", {}, r"mine.py:Lines can't be made: TypeError"),
    ],
)
def test_a_class_that_is_no_logger_is_refused_in_one_sentence(run, name, kwargs, sentence):
    section = LoggingSection(loggers=[f"{run.folder.parent}/mine.py:{name}"], kwargs=kwargs)

    with pytest.raises(ConfigError, match=sentence):
        start_loggers(section, run, 0, pytest.fail)
