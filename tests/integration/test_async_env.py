"""A job with an async environment that hangs, blocks and starts processes: the run goes on, says so, and leaves nothing behind."""

import os
import re
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.jobs import COMMAND_S, SMALL, clean_environment, write_model

pytestmark = pytest.mark.slow

ENV = """
import asyncio
import subprocess
import threading
from pathlib import Path

class Env:
    resets = 0

    async def reset(self, *, seed):
        Env.resets += 1
        self.deaf = Env.resets == 5
        if Env.resets == 1:
            for number, options in enumerate(({"start_new_session": True}, {"env": {}}, {})):
                child = subprocess.Popen(["/bin/sleep", "1000"], **options)
                Path(f"child{number}").write_text(str(child.pid))
        return "x", {}

    async def step(self, action):
        while self.deaf:
            try:
                await asyncio.sleep(1000)
            except asyncio.CancelledError:
                pass
        if Env.resets == 2:  # the first one was a trial
            threading.Event().wait(0.4)
        return None, 1.0, True, False, {}

    async def close(self): ...
"""


def test_a_job_survives_its_async_environment_which_leaves_no_process_behind(tmp_path: Path):
    (tmp_path / "env.py").write_text(ENV)
    (tmp_path / "small.yaml").write_text(SMALL)
    write_model(tmp_path / "model")
    changes = ("env.isolation=auto", "env.class=env.py:Env", "env.step_timeout_s=1", "run.steps=100000", "env.concurrency=1")
    job = subprocess.Popen(
        [sys.executable, "-m", "rubato.runtime.cli", "launch", "small.yaml", "--run-dir", "run", f"model.path={tmp_path}/model", *changes],
        cwd=tmp_path, env=clean_environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    assert job.stdout is not None

    said: list[str] = []
    wanted = [rf"step of Env \({tmp_path}/env.py:\d+\) blocked its environment manager", "hung in step", r"^ +\d+  +1.00 "]
    while wanted and (line := job.stdout.readline()):
        said.append(line)
        wanted = wanted[1:] if re.search(wanted[0], line) else wanted
    children = [os.pidfd_open(int(file.read_text())) for file in sorted(tmp_path.glob("child*"))]
    job.send_signal(signal.SIGKILL)
    job.communicate()

    assert not wanted, said
    assert len(children) == 3
    for child in children:
        assert select.select([child], [], [], COMMAND_S)[0]
        os.close(child)
