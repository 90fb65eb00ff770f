import asyncio
import os
import signal
import socket
import sys

import pytest

from rubato.runtime.errors import LaunchError
from rubato.runtime.monitor.app import RunActions
from rubato.runtime.monitor.views import ActorView


def actor(name="engine-1", *, pid=1, host=None, role="engine"):
    return ActorView(
        name=name, role=role, pid=pid, host=host or socket.gethostname(), state="ready", incarnation=1, mailbox=0, rate_s=0.0, idle=1.0, metrics={}, pool="", hardware=""
    )  # fmt: skip


async def test_a_kill_ends_the_process_as_a_crash_would(tmp_path):
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", "input()", stdin=asyncio.subprocess.PIPE)

    told = await RunActions(tmp_path).act("kill", actor(pid=process.pid))

    assert await process.wait() == -signal.SIGKILL
    assert told == f"engine-1 killed (signal 9, process {process.pid})"


@pytest.mark.parametrize(
    ("chosen", "why"),
    [
        (actor("node-1", role="node"), "rubato stop"),
        (actor(pid=os.getpid()), "rubato stop"),
        (actor(host="elsewhere"), "runs on elsewhere"),
        (actor(pid=2**22 + 1), "can't be killed"),
    ],
)
async def test_a_kill_is_refused_for_the_launcher_this_process_other_hosts_and_what_is_gone(tmp_path, chosen, why):
    with pytest.raises(LaunchError, match=why):
        await RunActions(tmp_path).act("kill", chosen)


async def test_asking_a_run_that_is_not_there_is_one_sentence(tmp_path):
    with pytest.raises(LaunchError, match="holds no run"):
        await RunActions(tmp_path).act("drain", actor())
