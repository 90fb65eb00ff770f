"""Hosts that join a run, each a node agent with a warm parent of its own, forked of this process, in which all that they import is loaded.

Each is what `rubato add --pools … --join -` is: the same command line in a process with its own folder, its own way through the gate and
actors that its own warm parent forks. Only what Python imports is shared, which is what lets 64 of them fit into one machine.
"""

import asyncio
import gc
import io
import os
import select
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

from rubato.runtime.cli import guarded
from rubato.runtime.config.compose import load
from rubato.runtime.config.schema import schema_of
from rubato.runtime.importer import FOLDER as CODE
from rubato.runtime.importer import VARIABLE as CODE_VARIABLE
from rubato.runtime.launch import children, commands, forks, launcher, warm
from rubato.runtime.launch.forks import ForkedProcess

launcher.allow_many_files()

NICE = 5
"""The first host of a real run shares no processor with the others."""


def warm_up(config: Path) -> None:
    """Import what hosts of a run of this config will. No thread may come of it, since there are forks to be."""
    os.environ.update(dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1"))
    loaded = load(config)
    schema_of(loaded)
    _ = loaded.brought_by
    for module in ("uvloop", "numpy", "jinja2.sandbox", "tokenizers", "rubato.actors.scripted.engine", "rubato.runtime.observe.tap"):
        import_module(module)


def start(folder: Path, token: str, pools: str) -> int:
    """The pid of a new host, which brings `pools` into the run of `token` and ends with this process. `folder`.log has what it says."""
    gc.collect()
    gc.freeze()
    parent = os.getpid()
    if not (pid := os.fork()):
        _child(lambda: _host(folder, token, pools), parent, folder.with_suffix(".log"))
    return pid


def _host(folder: Path, token: str, pools: str) -> int:
    requests, requests_end = os.pipe()
    replies, replies_end = os.pipe()
    parent = os.getpid()
    if not (pid := os.fork()):
        os.dup2(requests, 0)
        os.dup2(replies_end, 1)
        os.environ[CODE_VARIABLE] = str(folder / CODE)
        _child(lambda: warm.main([str(folder)]), parent)
    os.close(requests)
    os.close(replies_end)
    executed = children.start_module
    there = [pid]

    async def start_module(module: str, *arguments: str, **options: Any) -> Any:
        """The first warm parent is there already; whatever else is started is executed, as is the next one where that was killed for being
        slow: the pipes of the first are closed by then, and their numbers may be those of other files."""
        if module != forks.MODULE or not there:
            return await executed(module, *arguments, **options)
        stdout = asyncio.StreamReader()
        await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(stdout), os.fdopen(replies, "rb"))
        return _WarmParent(there.pop(), _Input(requests_end), stdout)

    forks.start_module = start_module
    sys.stdin = io.StringIO(f"{token}\n")
    return guarded(commands.main, ["add", "--pools", pools, "--join", "-", "--run-dir", str(folder)])


class _Input:
    """The end of a pipe to which requests go."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def write(self, data: bytes) -> None:
        os.write(self._fd, data)

    def close(self) -> None:
        os.close(self._fd)


class _WarmParent(ForkedProcess):
    """What `forks` uses of a subprocess of asyncio's."""

    def __init__(self, pid: int, stdin: _Input, stdout: asyncio.StreamReader) -> None:
        super().__init__(pid)
        self.stdin, self.stdout = stdin, stdout

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    async def communicate(self) -> None:
        await self.wait()


def _child(be: Callable[[], int], parent: int, log: Path | None = None) -> NoReturn:
    """In a process that was just forked: it ends with its `parent`."""
    code = 1
    try:
        children._PARENT = os.getpid()  # pyright: ignore[reportPrivateUsage] - of what is started from here
        children.die_with(parent)
        os.nice(NICE)
        if log is not None:
            file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            os.dup2(file, 1)
            os.dup2(file, 2)
        code = be()
    except Exception:  # noqa: BLE001 - its log has it
        traceback.print_exc()
    finally:
        with suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def end(pids: Sequence[int], limit_s: float) -> list[int]:
    """Wait for the hosts' ends; what is left after `limit_s` is killed. Their exit codes."""
    codes: list[int] = []
    for pid in pids:
        handle = os.pidfd_open(pid)
        try:
            if not select.select([handle], [], [], limit_s)[0]:
                os.kill(pid, signal.SIGKILL)
            codes.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        finally:
            os.close(handle)
    return codes
