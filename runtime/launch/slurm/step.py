"""What a step of Slurm runs, as `python -m rubato.runtime.launch.slurm.step FOLDER PATIENCE_S MODULE ARGUMENTS…`: one command, as its child.

Its stdin is the srun that started the step: first the command's own first line, then the number of each signal for it, and empty lines
that say that the host still listens. To that srun it says `up STEP NODE` and `ended CODE`, which no exit code of srun tells apart from others.
"""

import asyncio
import os
import signal
import sys
import tempfile
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

from rubato.runtime.launch.children import start_module

REQUEUE = "RUBATO_REQUEUE"
"""The variable of a batch script that is nothing but the launcher: where its node is lost, --no-kill keeps the job without one."""

SILENT_S = 6.0
"""Three beats: who was heard since is there still."""


class Launcher:
    """The other end of the pipe: who reads it is sure of it for `patience_s` after each line."""

    def __init__(self, lines: asyncio.StreamReader, patience_s: float) -> None:
        self._lines, self._patience_s = lines, patience_s
        self._clock = asyncio.get_running_loop().time
        self._heard_s = self._clock()
        self.lost = False

    async def next(self) -> bytes:
        """The next line; empty where there is none, because the pipe has ended or the launcher is lost."""
        try:
            async with asyncio.timeout_at(self._heard_s + self._patience_s):
                line = await self._lines.readline()
        except TimeoutError:
            self.lost = True
            return b""
        self._heard_s = self._clock()
        return line

    def is_silent(self) -> bool:
        return self._clock() - self._heard_s > SILENT_S


async def run(folder: Path, patience_s: float, module: str, *arguments: str) -> None:
    """Stay until the command has ended; it is killed once the launcher is lost."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):  # Slurm sends them to every process of a step: it is the command's to end
        loop.add_signal_handler(number, lambda: None)
    lines = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    launcher = Launcher(lines, patience_s)
    token = await launcher.next()
    with _writable(folder) as cwd:
        process = await start_module(module, *arguments, cwd=cwd, stdin=asyncio.subprocess.PIPE, stdout=sys.stderr, start_new_session=True)
        assert process.stdin is not None
        process.stdin.write(token)
        process.stdin.close()
        print("up", os.environ["SLURM_STEP_ID"], os.environ["SLURMD_NODENAME"], flush=True)  # noqa: T201 - for its srun
        async with asyncio.TaskGroup() as tasks:
            obeying = tasks.create_task(_obey(launcher, process))
            code = await process.wait()
            obeying.cancel()
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
    if launcher.is_silent() and not launcher.lost:
        await launcher.next()
    if launcher.lost and os.environ.get(REQUEUE):
        await (await asyncio.create_subprocess_exec("scontrol", "requeue", os.environ["SLURM_JOB_ID"])).wait()
    with suppress(OSError):  # its srun is lost too
        print("ended", code, flush=True)  # noqa: T201 - for its srun


async def _obey(launcher: Launcher, process: asyncio.subprocess.Process) -> None:
    while line := await launcher.next():
        if line.strip():
            with suppress(ProcessLookupError):
                process.send_signal(int(line))
    with suppress(ProcessLookupError):
        process.kill()


@contextmanager
def _writable(folder: Path) -> Generator[Path]:
    """`folder`, or where this host has no such one of its own or shared, one for the block."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError:
        with tempfile.TemporaryDirectory(prefix="rubato-") as own:
            yield Path(own)
    else:
        yield folder


if __name__ == "__main__":
    asyncio.run(run(Path(sys.argv[1]), float(sys.argv[2]), *sys.argv[3:]))
