"""The processes that we start: each ends with its parent, however that ends; and a job's preparation, which is one of them."""

import asyncio
import ctypes
import os
import signal
import sys
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from rubato.runtime.errors import LaunchError

LOOK_S = 0.05
"""Period of looking for a process, where the system sends no event at its end."""

PR_SET_PDEATHSIG = 1
"""Linux: deliver a signal to this process when the thread that started it ends."""
PR_SET_CHILD_SUBREAPER = 36
"""Linux: processes below this one that lose their parent become its children."""

LONGEST_LINE = 1 << 20
"""Bytes; what is longer tells no progress."""

STDERR_TAIL = 4000
"""Bytes of a process's stderr in which its last sentence is looked for."""

_PARENT = os.getpid()
"""Of the processes started from here."""

try:
    _prctl = ctypes.CDLL(None, use_errno=True).prctl  # not between fork and exec, where loading a library may deadlock
except (OSError, AttributeError):
    _prctl = None


def die_with_parent() -> None:
    """Run in the child between fork and exec. Elsewhere than on Linux it does nothing: such a child notices EOF on its pipe instead."""
    die_with(_PARENT)


def die_with(parent: int) -> None:
    """End this process with `parent`, of which it is a child."""
    if _prctl is None:
        return
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the call above, and init or a subreaper took its place
        os.kill(os.getpid(), signal.SIGKILL)


def adopt_orphans(adopts: bool) -> bool:
    """Whether processes below this one that lose their parent become its children from here on; False where the system can't do that."""
    return _prctl is not None and _prctl(PR_SET_CHILD_SUBREAPER, int(adopts)) == 0


async def start_module(
    module: str, *arguments: str, more: Mapping[str, str] | None = None, cores: Sequence[int] = (), **options: Any
) -> asyncio.subprocess.Process:
    """`python -m module arguments…`, which takes no module from the folder that it starts in. `more` is added to its environment, and
    it is pinned to `cores`, if any; `options` are those of `create_subprocess_exec`, and without `stdin` it reads no input.
    """

    def begin() -> None:
        die_with_parent()
        if cores:
            os.sched_setaffinity(0, cores)

    environment = {**os.environ, "PYTHONSAFEPATH": "1", **(more or {})}
    options.setdefault("stdin", asyncio.subprocess.DEVNULL)
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", module, *arguments,
        env=environment, preexec_fn=begin, **options,
    )  # fmt: skip


def last_line(stderr: Path) -> str:
    """What a process that ended last said there; empty where it said nothing."""
    try:
        lines = stderr.read_bytes()[-STDERR_TAIL:].decode(errors="replace").strip().splitlines()
    except OSError:
        return ""
    return lines[-1].strip() if lines else ""


def is_stopped(pid: int) -> bool:
    """Whether something holds that process of this host still (SIGSTOP, or a debugger)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "Tt"
    except OSError:
        return False


async def until_gone(pid: int) -> None:
    """Return once there is no process `pid` of this host any more, whose child it need not be."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    except (AttributeError, OSError):  # elsewhere than on Linux no event tells it
        while _is_there(pid):  # noqa: ASYNC110
            await asyncio.sleep(LOOK_S)
        return
    loop, gone = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(handle, gone.set)
    try:
        await gone.wait()
    finally:
        loop.remove_reader(handle)
        os.close(handle)


def _is_there(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError as error:
        return isinstance(error, PermissionError)
    return True


def on_signals(act: Callable[[signal.Signals], object]) -> None:
    """Call `act` in the running loop at each SIGINT, SIGTERM or SIGHUP; one that was ignored at our start (nohup) stays so."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if not is_ignored(number):
            loop.add_signal_handler(number, act, number)


def is_ignored(number: signal.Signals) -> bool:
    """Whether this signal was ignored at our start: nohup does so with SIGHUP, a shell's `&` in a script with SIGINT."""
    return signal.getsignal(number) is signal.SIG_IGN


# -- preparation ---------------------------------------------------------------------------------------------


class _ProgressLine(msgspec.Struct):
    """`{"what": …, "progress": …}`, the share done from 0 to 1; other lines are passed over."""

    what: str = ""
    progress: float = 0.0


async def prepare(module: str, folder: Path, tell: Callable[[str, float], None]) -> str:
    """Run `python -m module folder` to its end; returns what it last called its work, if anything.

    Its stderr goes to a file among the run's logs. Raises LaunchError where it fails.
    """
    errors, what = folder / "logs" / f"{module}.stderr", ""
    with errors.open("wb") as stderr:
        process = await start_module(module, str(folder), stdout=asyncio.subprocess.PIPE, stderr=stderr, limit=LONGEST_LINE)
    assert process.stdout is not None
    try:
        async for line in _lines(process.stdout):
            what = line.what or what
            tell(what or module, line.progress)
        code = await process.wait()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if code:
        raise LaunchError(f"preparing {module} failed: {last_line(errors) or 'it gave no reason'}")
    return what


async def _lines(stdout: asyncio.StreamReader) -> AsyncGenerator[_ProgressLine]:
    while True:
        try:
            line = await stdout.readline()
        except ValueError:  # longer than LONGEST_LINE
            continue
        if not line:
            return
        try:
            yield msgspec.json.decode(line, type=_ProgressLine)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            continue
