"""What a launch finds of the one before it that was killed."""

from pathlib import Path

import msgspec
import pytest

from runtime.launch.folder import RunFolder


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

    again = RunFolder(path)
    card = again.open(resume=how == "resume", force=how == "force")
    again.close()

    assert not sockets.exists()
    assert not Path(card.sockets).exists()


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
    (path / "run.json").unlink()

    again = RunFolder(path)
    card = again.open(resume=True, force=False)
    again.close()

    assert card.launches == 1
