"""Who may look into a run's folder: its owner alone, whatever the umask, and nobody is locked out of a folder of their own."""

import os
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from rubato.runtime.launch.folder import RunFolder, make_keys

NOBODY = 65_534

LOOK = """
import os, sys
folder, uid = sys.argv[1], int(sys.argv[2])
if uid:
    os.setgroups([]); os.setresgid(uid, uid, uid); os.setresuid(uid, uid, uid)
print(sorted(os.listdir(folder)))
"""


@pytest.fixture
def place():
    """A folder that everybody may pass through, as /tmp and most homes are."""
    with tempfile.TemporaryDirectory(prefix="rubato-test-") as made:
        os.chmod(made, 0o755)
        before = os.umask(0o002)
        yield Path(made)
        os.umask(before)


def opened(path, **flags):
    """A run folder after a launch, and what the launch said about it."""
    folder = RunFolder(path)
    folder.open(resume=False, force=False, **flags)
    told = folder.open_to_others()
    (path / "samples.jsonl").touch()
    folder.close()
    return told


def look(path, uid):
    return subprocess.run([sys.executable, "-c", LOOK, path, str(uid)], capture_output=True, text=True, check=False)


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


def test_a_new_run_folder_is_its_owners_alone_and_its_parents_are_as_usual(place):
    told = opened(place / "runs" / "a")

    assert told == ""
    assert (mode(place / "runs"), mode(place / "runs" / "a")) == (0o775, 0o700)


def test_an_empty_folder_is_closed_and_so_is_one_in_which_keys_were_made_first(place):
    (place / "empty").mkdir()
    (place / "keyed").mkdir()
    make_keys(place / "keyed")

    told = opened(place / "empty"), opened(place / "keyed")

    assert told == ("", "")
    assert (mode(place / "empty"), mode(place / "keyed")) == (0o700, 0o700)


def test_a_folder_with_files_of_the_users_stays_as_open_as_it_is_and_that_is_told(place):
    (place / "mine").mkdir()
    (place / "mine" / "notes.txt").touch()

    told = opened(place / "mine")

    assert mode(place / "mine") == 0o775
    assert told == (
        f"{place}/mine was there before, and other users of this host may look into it (mode 775): samples, checkpoints and logs can be "
        f"read. Close it with: chmod 700 {place}/mine"
    )


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_of_the_host_can_not_look_into_a_run(place):
    opened(place / "run")

    others, roots = look(place / "run", NOBODY), look(place / "run", 0)

    assert look(place, NOBODY).returncode == 0, "the way to it is open"
    assert "PermissionError" in others.stderr
    assert "samples.jsonl" in roots.stdout
