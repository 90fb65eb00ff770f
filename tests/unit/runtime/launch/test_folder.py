"""What a launch finds of the one before it that was killed."""

import json
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import yaml

from rubato.runtime.errors import LaunchError
from rubato.runtime.launch.card import read_card
from rubato.runtime.launch.folder import ON_A_HOST, RunFolder


@pytest.fixture
def killed(tmp_path):
    """A run whose launcher never came to clean up; returns the folder and its sockets."""
    folder = RunFolder(tmp_path / "run")
    card = folder.open(resume=False, force=False)
    folder.config.write_text("")
    folder.write(card)
    folder._lock.close()  # as the kernel does when a process dies
    yield tmp_path / "run", Path(card.sockets)
    folder.close()


@pytest.mark.parametrize("how", ["resume", "force"])
def test_sockets_of_a_killed_launch_are_cleared_away_by_the_next(killed, how):
    path, sockets = killed
    (sockets / "redis.sock").touch()
    half = sockets.with_name(f"{sockets.name}.gone")  # a launch that was killed while it cleared
    half.mkdir()

    again = RunFolder(path)
    card = again.open(resume=how == "resume", force=how == "force")
    again.close()

    assert not sockets.exists()
    assert not half.exists()
    assert not Path(card.sockets).exists()


def test_sockets_of_a_process_that_was_killed_go_with_the_next_launch_of_any_run(killed, tmp_path):
    _, sockets = killed
    living = RunFolder(tmp_path / "living")
    there = Path(living.open(resume=False, force=False).sockets)
    code = "import sys; from pathlib import Path; from rubato.runtime.launch.folder import RunFolder as F; import os"
    code += "; print(F(Path(sys.argv[1])).open(resume=False, force=False).sockets, flush=True); os.kill(os.getpid(), 9)"
    told = subprocess.run([sys.executable, "-c", code, str(tmp_path / "host")], capture_output=True, text=True, check=False)
    dead = Path(told.stdout.strip())
    assert dead.is_dir()

    other = RunFolder(tmp_path / "other")
    other.open(resume=False, force=False)
    other.close()

    assert not dead.exists()
    assert there.exists()
    assert sockets.exists()  # its mark is held by this process
    living.close()
    assert not there.exists()


def test_a_host_that_joins_is_not_told_of_flags_that_it_has_not(finished):
    found = RunFolder(finished, words=ON_A_HOST).problems(resume=False, force=False, model="")

    assert found == [f"{finished} already holds a run (step 2). Choose another --run-dir."]


def test_a_folder_that_is_not_of_sockets_is_never_removed(killed, tmp_path):
    path, _ = killed
    precious = tmp_path / "precious"
    precious.mkdir()
    card = msgspec.json.decode((path / "run.json").read_bytes())
    (path / "run.json").write_bytes(msgspec.json.encode(card | {"sockets": str(precious)}))

    again = RunFolder(path)
    again.open(resume=True, force=False)
    again.close()

    assert precious.is_dir()


def test_a_launch_killed_before_it_wrote_its_card_is_resumed_as_a_first_one(killed):
    path, _ = killed
    before = read_card(path)
    (path / "run.json").unlink()

    again = RunFolder(path)
    card = again.open(resume=True, force=False)
    again.close()

    assert card.id != before.id


@pytest.fixture
def finished(tmp_path):
    """A run of two steps beside which its user keeps a model and notes."""
    folder = RunFolder(tmp_path / "run")
    folder.write(folder.open(resume=False, force=False))
    folder.config.write_text("run: {}\n")
    (folder.path / "metrics.jsonl").write_text('{"step": 2}\n')
    (folder.path / "checkpoints" / "step_2").mkdir(parents=True)
    (folder.path / "model").mkdir()
    (folder.path / "notes.txt").write_text("mine")
    folder.close()
    return folder.path


@pytest.mark.parametrize("how", ["refused", "killed", "started"])
def test_a_resumed_launch_that_does_not_start_leaves_the_config_as_it_was(finished, how):
    folder = RunFolder(finished)
    folder.open(resume=True, force=False)
    folder.config.write_text("run: {steps: 1}\n")
    if how == "started":
        folder.commit()
    if how == "killed":
        folder._lock.close()
        folder = RunFolder(finished)
        folder.open(resume=True, force=False)
    folder.close()

    assert folder.config.read_text() == ("run: {steps: 1}\n" if how == "started" else "run: {}\n")
    assert not (finished / ".replaced").exists()


def test_what_a_resumed_launch_changes_is_written_down_once_it_is_sure_to_start(finished):
    given = ["{train: {lr: 0.1, steps: 2}, state: {url: a}}", "{train: {lr: 0.3, steps: 2}, state: {url: 'redis://:secret@b'}, added: 1}"]
    before, after = (yaml.safe_dump(yaml.safe_load(text)) for text in given)
    told = []
    for old, new, starts in ((before, after, False), (before, after, True), (after, after, True)):
        finished.joinpath("config.yaml").write_text(old)
        folder = RunFolder(finished)
        folder.open(resume=True, force=False)
        folder.config.write_text(new)
        if starts:
            folder.commit()
        folder.close()
        changes = finished / "changes.jsonl"
        told.append([json.loads(line)["changed"] for line in changes.read_text().splitlines()] if changes.exists() else [])

    line = [{"key": "train.lr", "old": 0.1, "new": 0.3}]
    assert told == [[], [line], [line]]
    assert (finished / "changes.jsonl").stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(("flags", "said"), [({}, ["already holds a run (step 2)"]), ({"resume": True}, []), ({"force": True}, [])])
def test_what_a_launch_would_be_refused_for_is_told_without_touching_anything(finished, flags, said):
    before = sorted(finished.rglob("*"))

    found = RunFolder(finished).problems(**{"resume": False, "force": False, "model": "", **flags})

    assert len(found) == len(said)
    assert all(part in sentence for part, sentence in zip(said, found, strict=True))
    assert sorted(finished.rglob("*")) == before


def test_a_place_that_can_not_be_a_folder_is_told(tmp_path):
    (tmp_path / "file").touch()

    (found,) = RunFolder(tmp_path / "file" / "run").problems(resume=False, force=False, model="")

    assert "can't be used as a run folder" in found


def test_force_takes_away_what_the_run_wrote_and_nothing_else(finished):
    folder = RunFolder(finished)
    folder.open(resume=False, force=True, model="model")
    folder.commit()
    folder.close()

    assert _names(finished) == [".lock", "logs", "model", "notes.txt"]
    assert _names(finished / "logs") == []


@pytest.mark.parametrize("how", ["closed", "killed"])
def test_a_forced_launch_that_does_not_start_leaves_the_run_as_it_was(finished, how):
    before = _names(finished)
    folder = RunFolder(finished)
    folder.open(resume=False, force=True)
    folder.config.write_text("another: {}\n")
    if how == "closed":
        folder.close()
    else:
        folder._lock.close()
        again = RunFolder(finished)
        with pytest.raises(LaunchError, match=r"already holds a run \(step 2\)"):
            again.open(resume=False, force=False)

    assert _names(finished) == before
    assert folder.config.read_text() == "run: {}\n"
    assert (finished / "checkpoints" / "step_2").is_dir()


@pytest.mark.parametrize("flags", [{"resume": False, "force": True}, {"resume": False, "force": False}])
def test_a_folder_of_somebody_elses_is_refused_untouched(tmp_path, flags):
    (tmp_path / ".git").mkdir()
    (tmp_path / "config.yaml").write_text("mine")
    (tmp_path / "logs").mkdir()

    with pytest.raises(LaunchError, match="but no run of ours: nothing there was touched"):
        RunFolder(tmp_path).open(**flags)

    assert _names(tmp_path) == [".git", "config.yaml", "logs"]


def test_force_needs_no_run_where_only_the_model_lies(tmp_path):
    (tmp_path / "model").mkdir()

    folder = RunFolder(tmp_path)
    folder.open(resume=False, force=True, model="model")
    folder.close()

    assert (tmp_path / "model").is_dir()


def test_a_model_among_what_force_takes_away_is_refused(finished):
    before = _names(finished)

    with pytest.raises(LaunchError, match=r"model\.path=checkpoints/step_2 lies in"):
        RunFolder(finished).open(resume=False, force=True, model="checkpoints/step_2")

    assert _names(finished) == before


def test_a_run_that_made_no_step_is_launched_again_without_a_flag(killed):
    path, sockets = killed
    before = read_card(path)
    (path / "logs" / "old.jsonl").touch()
    (path / "checkpoints").mkdir()
    (path / "metrics.jsonl").touch()

    folder = RunFolder(path)
    card = folder.open(resume=False, force=False)
    folder.commit()
    folder.close()

    assert card.id != before.id
    assert not sockets.exists()
    assert _names(path / "logs") == []


def test_a_name_too_long_is_refused(tmp_path):
    with pytest.raises(LaunchError, match="can't be used as a run folder: File name too long"):
        RunFolder(tmp_path / ("x" * 300)).open(resume=False, force=False)


def _names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def test_a_folder_is_made_anew_for_a_run_that_comes_back_and_can_be_resumed(tmp_path):
    def bring(folder):
        (folder / "checkpoints" / "step_3").mkdir(parents=True)
        return ["after step 3"]

    assert RunFolder(tmp_path / "run").bring(bring, "run: {}\n", "") == ["after step 3"]

    again = RunFolder(tmp_path / "run")
    again.open(resume=True, force=False)
    again.close()
    assert (tmp_path / "run" / "config.yaml").stat().st_mode & 0o777 == 0o600


def test_a_run_that_was_cut_short_as_it_came_back_comes_back_the_next_time(tmp_path, monkeypatch):
    def bring(folder):
        (folder / "checkpoints" / "step_3").mkdir(parents=True)
        (folder / "metrics.jsonl").write_text("")
        return ["after step 3"]

    class Killed(BaseException):
        pass

    def killed(entry, to):
        if entry.name == "metrics.jsonl":
            raise Killed
        return replace(entry, to)

    replace = Path.replace
    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", killed)
        with pytest.raises(Killed):
            RunFolder(tmp_path / "run").bring(bring, "run: {}\n", "")
    assert not (tmp_path / "run" / "config.yaml").exists()

    RunFolder(tmp_path / "run").bring(lambda folder: pytest.fail("all of it is there"), "", "")

    assert _names(tmp_path / "run") == [".lock", "checkpoints", "config.yaml", "metrics.jsonl"]
    assert (tmp_path / "run" / "checkpoints" / "step_3").is_dir()
    assert (tmp_path / "run" / "config.yaml").read_text() == "run: {}\n"


def test_where_nothing_could_be_brought_no_folder_is_left(tmp_path):
    def fails(folder):
        raise LaunchError("nothing there")

    with pytest.raises(LaunchError, match="nothing there"):
        RunFolder(tmp_path / "run").bring(fails, "", "")

    assert not (tmp_path / "run").exists()


def test_nothing_is_brought_into_a_folder_that_holds_a_run(killed):
    path, _ = killed
    (path / "metrics.jsonl").write_text('{"step": 1}\n')

    with pytest.raises(LaunchError, match="already holds a run"):
        RunFolder(path).bring(lambda folder: pytest.fail("it was asked for"), "", "")

    assert (path / "metrics.jsonl").read_text() == '{"step": 1}\n'
