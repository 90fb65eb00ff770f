"""The chaos tool refuses what it can't do before it starts anything, and does not pass when it did nothing."""

import argparse
import asyncio
import random
from types import SimpleNamespace

import pytest

from tests.jobs import SMALL
from tools import chaos, chaos_job


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A working folder with a job's config, and a folder of its own for temporary files."""
    (tmp_path / "small.yaml").write_text(SMALL)
    (tmp_path / "file").touch()
    (tmp_path / "tmp").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    monkeypatch.setattr(chaos_job.ctypes, "CDLL", lambda name: SimpleNamespace(prctl=lambda *given: 0))
    return tmp_path


IDLE = "actors.reward_service={class: 'rubato.actors.rewards.service:RewardService', count: 0}"

MISTAKES = [
    pytest.param(["--kinds", "foo"], "--kinds: 'foo' is no kind. Kinds are kill, stop, restart.", id="unknown kind"),
    pytest.param(["--kinds", "kill,"], "--kinds: '' is no kind.", id="empty kind"),
    pytest.param(["--kill", "trainr"], "--kill: 'trainr' is not a role of this job. Its roles are", id="unknown role"),
    pytest.param(["--kill", ""], "--kill: '' is not a role of this job.", id="empty role"),
    pytest.param(["--kill", "reward_service", IDLE], "--kill: 'reward_service' is not a role", id="role without actors"),
    pytest.param(["--seconds", "nan"], "--seconds is nan; it must be a finite number above 0.", id="seconds nan"),
    pytest.param(["--seconds", "inf"], "--seconds is inf; it must be a finite number above 0.", id="seconds without end"),
    pytest.param(["--seconds", "0"], "--seconds is 0; it must be a finite number above 0.", id="no seconds"),
    pytest.param(["--rest", "-5"], "--rest is -5; it must be a whole number at least 0.", id="rest negative"),
    pytest.param(["--pause", "nan", "1"], "--pause is nan 1; it must be two finite numbers", id="pause nan"),
    pytest.param(["--pause", "9", "1"], "--pause is 9 1; it must be two finite numbers, the smaller first.", id="pause reversed"),
    pytest.param(["--json", "/nonexistent/x.json"], "/nonexistent/x.json can't be written: No such file or directory.", id="json nowhere"),
    pytest.param(["--json", "tmp"], "tmp can't be written: Is a directory.", id="json a folder"),
    pytest.param(["--run-dir", "/proc/foo/x"], "--run-dir: /proc/foo/x can't be made: No such file or directory.", id="run folder in proc"),
    pytest.param(["--run-dir", "file"], "--run-dir: file can't be made: File exists.", id="run folder a file"),
]  # fmt: skip


@pytest.mark.parametrize(("given", "sentence"), MISTAKES)
def test_a_mistake_is_refused_before_anything_is_started(given, sentence, place, monkeypatch, capsys):
    async def start(self, *overrides):
        pytest.fail("the job was started")

    monkeypatch.setattr(chaos_job.Job, "start", start)

    assert chaos.main(["small.yaml", *given]) == 2

    said = capsys.readouterr().out
    assert sentence in said
    assert len(said.splitlines()) == 1
    assert list((place / "tmp").iterdir()) == []


class QuietJob:
    """Runs, and has no process of the role asked for."""

    launcher = SimpleNamespace(returncode=None)

    async def start(self, *overrides):
        pass

    def steps(self):
        return 1

    def victims(self):
        return [chaos_job.Victim(1, "engine", "engine-1")]


def test_a_run_of_which_nothing_was_hit_does_not_pass():
    job = QuietJob()
    tried = chaos.Chaos(job, ["worker", "redis"], ["kill"], random.Random(1))
    args = argparse.Namespace(seed=1, seconds=0.2, pause=(0.0, 0.0), rest=None)

    with pytest.raises(chaos.Broken, match=r"nothing was hit in 0\.2 s: no process of worker, redis lived"):
        asyncio.run(chaos.go(args, None, job, tried))


def test_the_last_line_names_the_roles_that_were_never_hit():
    tried = chaos.Chaos(QuietJob(), ["engine", "worker"], ["kill"], random.Random(1))
    tried.events.append({"role": "engine", "kind": "kill"})
    figures = {"hits": {"kill": 1}, "fates": {}, "launches": 1, "steps": 3, "samples": 8}

    told = chaos._summary(argparse.Namespace(seed=1, seconds=4.0), figures, tried.missed())

    assert told.endswith("; never hit: worker")


def test_a_config_named_from_another_folder_is_the_one_that_is_launched(place):
    async def ended():
        job = chaos_job.Job(chaos.Path("small.yaml"), place / "run", ["--dry-run", "train.kind=scripted"])
        await job.start()
        return await job.launcher.wait(), job.output.read_text()

    code, said = asyncio.run(ended())

    assert code == 0, said


@pytest.mark.parametrize("given", [[], ["--run-dir", "kept"]])
def test_a_failed_run_names_all_that_is_kept_of_it(given, place, monkeypatch, capsys):
    async def go(*given):
        raise chaos.Broken("it is stuck")

    monkeypatch.setattr(chaos, "go", go)

    assert chaos.main(["small.yaml", *given]) == 1

    said = capsys.readouterr().out
    kept = set((place / "tmp").iterdir())
    assert said.startswith("BROKEN, seed 1: it is stuck (run: ")
    assert kept
    assert all(str(path) in said for path in kept)


def test_a_crash_of_the_tool_itself_names_all_that_is_kept(place, monkeypatch):
    async def go(*given):
        raise KeyError("ours")

    monkeypatch.setattr(chaos, "go", go)

    with pytest.raises(KeyError) as told:
        chaos.main(["small.yaml"])

    notes = "".join(told.value.__notes__)
    assert all(str(path) in notes for path in (place / "tmp").iterdir())


def test_an_interrupted_run_leaves_nothing(place, monkeypatch, capsys):
    async def go(*given):
        raise asyncio.CancelledError

    monkeypatch.setattr(chaos, "go", go)

    assert chaos.main(["small.yaml"]) == 130
    assert list((place / "tmp").iterdir()) == []
