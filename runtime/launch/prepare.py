"""Runs a job's preparation: a module of its own process that may print JSON lines of its progress."""

import asyncio
import os
import sys
from collections.abc import AsyncGenerator, Callable
from pathlib import Path

import msgspec

from runtime.errors import LaunchError
from runtime.launch.children import die_with_parent

LONGEST_LINE = 1 << 20
"""Bytes; what is longer tells no progress."""
LAST = 4000
"""Bytes of its stderr in which its last sentence is looked for."""


class _Told(msgspec.Struct):
    """`{"what": …, "progress": …}`, the share done from 0 to 1; other lines are passed over."""

    what: str = ""
    progress: float = 0.0


async def prepare(module: str, folder: Path, tell: Callable[[str, float], None]) -> str:
    """Run `python -m module folder` to its end; returns what it last called its work, if anything.

    Its stderr goes to a file among the run's logs. Raises LaunchError where it fails.
    """
    errors, what = folder / "logs" / f"{module}.stderr", ""
    with errors.open("wb") as stderr:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", module, str(folder),
            stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=stderr, limit=LONGEST_LINE,
            env=dict(os.environ, PYTHONSAFEPATH="1"), preexec_fn=die_with_parent,
        )  # fmt: skip
    assert process.stdout is not None
    try:
        async for told in _lines(process.stdout):
            what = told.what or what
            tell(what or module, told.progress)
        code = await process.wait()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if code:
        said = errors.read_bytes()[-LAST:].decode(errors="replace").strip().splitlines()
        raise LaunchError(f"preparing {module} failed: {said[-1] if said else 'it gave no reason'}")
    return what


async def _lines(stdout: asyncio.StreamReader) -> AsyncGenerator[_Told]:
    while True:
        try:
            line = await stdout.readline()
        except ValueError:  # longer than LONGEST_LINE
            continue
        if not line:
            return
        try:
            yield msgspec.json.decode(line, type=_Told)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            continue
