"""A handler takes errors alone. What is to be undone whatever ends a block stands in an ExitStack."""

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
TAKES_ALL = re.compile(r"^\s*except\s*(:|.*\bBaseException)", re.MULTILINE)


def test_no_handler_takes_what_ends_a_task_or_a_process():
    files = subprocess.run(["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    ours = [name for name in files if not name.startswith("tests/")]

    assert len(ours) > 500
    assert [name for name in ours if TAKES_ALL.search((ROOT / name).read_text())] == []
