"""What a step of Slurm runs, as `python -m rubato.runtime.launch.slurm.step FOLDER PATIENCE_S MODULE ARGUMENTS…`: one command, as its child.

Its stdin is the srun that started the step: first the command's own first line, then the number of each signal for it, and empty lines
that say that somebody still listens. To that srun it says `up STEP NODE` and `ended CODE`, which no exit code of srun tells apart from others.
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


async def run(folder: Path, patience_s: float, module: str, *arguments: str) -> None:
    """Stay until the command has ended; it is killed once no line came for `patience_s`."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):  # Slurm sends them to every process of a step: it is the command's to end
        loop.add_signal_handler(number, lambda: None)
    lines = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    first = await lines.readline()
    with _writable(folder) as cwd:
        process = await start_module(module, *arguments, cwd=cwd, stdin=asyncio.subprocess.PIPE, stdout=sys.stderr, start_new_session=True)
        assert process.stdin is not None
        process.stdin.write(first)
        process.stdin.close()
        print("up", os.environ["SLURM_STEP_ID"], os.environ["SLURMD_NODENAME"], flush=True)  # noqa: T201 - for its srun
        async with asyncio.TaskGroup() as tasks:
            obeying = tasks.create_task(_obey(lines, process, patience_s))
            code = await process.wait()
            obeying.cancel()
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
    print("ended", code, flush=True)  # noqa: T201 - for its srun


async def _obey(lines: asyncio.StreamReader, process: asyncio.subprocess.Process, patience_s: float) -> None:
    line = b"\n"
    while line:
        if line.strip():
            with suppress(ProcessLookupError):
                process.send_signal(int(line))
        try:
            async with asyncio.timeout(patience_s):
                line = await lines.readline()
        except TimeoutError:
            break
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
