"""A job's preparation, whatever it prints; and how a process of a run ends."""

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from rubato.runtime.errors import LaunchError
from rubato.runtime.launch.children import prepare

MODULES = {
    "tells": """
import json
print("plain text")
print("{}[1, 2]")
print(json.dumps({"what": "half", "progress": 0.5}))
print("x" * (1 << 21))
print(json.dumps({"what": "all", "progress": 1.0}))
""",
    "floods": "import sys\nfor _ in range(20_000): print('a complaint', file=sys.stderr)\nprint('{\"what\": \"done\"}')",
    "fails": "import sys\nprint('first', file=sys.stderr)\nsys.exit('no disk')",
    "hangs": """
import os, sys, time
open(sys.argv[1] + "/pid", "w").write(str(os.getpid()))
print('{"what": "up"}', flush=True)
time.sleep(600)
""",
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    for name, text in MODULES.items():
        (tmp_path / f"prep_{name}.py").write_text(text)
    (tmp_path / "logs").mkdir()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path


async def test_lines_of_progress_are_told_and_others_passed_over(folder):
    told = []

    assert await prepare("prep_tells", folder, lambda *one: told.append(one)) == "all"

    assert told == [("half", 0.5), ("all", 1.0)]


async def test_a_preparation_that_floods_its_stderr_comes_to_its_end(folder):
    assert await prepare("prep_floods", folder, lambda what, share: None) == "done"

    assert (folder / "logs" / "prep_floods.stderr").stat().st_size > 1 << 17


async def test_a_preparation_that_fails_is_told_by_its_last_sentence(folder):
    with pytest.raises(LaunchError, match="preparing prep_fails failed: no disk"):
        await prepare("prep_fails", folder, lambda what, share: None)


async def test_a_preparation_ends_with_the_launch_that_waits_for_it(folder):
    me = asyncio.current_task()

    with pytest.raises(asyncio.CancelledError):
        await prepare("prep_hangs", folder, lambda what, share: me.cancel())

    me.uncancel()
    assert not Path("/proc", (folder / "pid").read_text()).exists()


ENDING = """
import atexit, sys, threading, time
from rubato.runtime.node import end_process

class Model:
    def __del__(self):
        print("taken apart")

def work():
    time.sleep(0.2)
    print("thread")

model = Model()
atexit.register(print, "at exit")
threading.Thread(target=work).start()
print("begun")
end_process(3)
"""

KEEPING = """
import sys
from pathlib import Path
from rubato.runtime.importer import load_object, use
from rubato.runtime.kept_code import keep
from rubato.runtime.node import end_process

folder = Path(sys.argv[1])
own = f"{folder}/own.py:notes"
keep(folder / "code", {"env": {"class": own}})
use(folder / "code")
load_object(own).write("the last line")
end_process(3)
"""


def test_a_process_ends_with_its_threads_and_exit_handlers_done_and_its_memory_left_to_the_system():
    ended = subprocess.run([sys.executable, "-c", ENDING], capture_output=True, text=True, timeout=60, check=False)

    assert (ended.returncode, ended.stdout.split("\n"), ended.stderr) == (3, ["begun", "thread", "at exit", ""], "")


def test_a_file_that_user_code_left_open_is_whole(tmp_path):
    (tmp_path / "own.py").write_text("notes = open(__file__ + '.notes', 'w')")

    ended = subprocess.run([sys.executable, "-c", KEEPING, str(tmp_path)], timeout=60, check=False)

    assert ended.returncode == 3
    assert (tmp_path / "own.py.notes").read_text() == "the last line"
