"""An agent that is a process: a command, or a function in a process of its own. `python -m rubato.actors.gateway.command TARGET`."""

import asyncio
import inspect
import json
import os
import re
import shlex
import shutil
import signal
import sys
import tempfile
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from rubato.runtime.importer import FILE_TARGET, load_configured
from rubato.runtime.launch.children import until_gone
from rubato.runtime.pool.values import clean

MODULE_TARGET = re.compile(r"[\w.]+:[A-Za-z_][\w.]*")
"""A function of a module, as module:name."""

TASK_FILE = "RUBATO_TASK_FILE"

PLACES = "rubato-agent-"
"""Folders for these begin so; the number of the process that made it follows."""

TAIL = 64 * 1024
"""Bytes at the end of each output in which the agent's last words are looked for."""

RESULT = frozenset(("reward", "answer"))

AFTER_S = 1.0
"""How long after an agent's end its outputs are read, which a process that it left may hold open."""


PIPES: Mapping[str, Any] = {
    "stdin": asyncio.subprocess.DEVNULL,
    "stdout": asyncio.subprocess.PIPE,
    "stderr": asyncio.subprocess.PIPE,
    "start_new_session": True,
}
"""Of an agent's process."""

Start = Callable[[Sequence[str], Mapping[str, str], Path], AbstractAsyncContextManager[asyncio.subprocess.Process]]
"""The process of a command, with these variables beside others, and with a file that it reads."""


class AgentEnded(Exception):
    """Without a result: how, as a part of a sentence."""


def words_of(agent: str, *, is_process: bool = False) -> list[str]:
    """The words of a command; of a function none, unless it `is_process`. Raises ValueError for an open quote."""
    if FILE_TARGET.fullmatch(agent) or MODULE_TARGET.fullmatch(agent):
        return [sys.executable, "-m", "rubato.actors.gateway.command", agent] if is_process else []
    return shlex.split(agent)


@asynccontextmanager
async def start(words: Sequence[str], variables: Mapping[str, str], shown: Path) -> AsyncGenerator[asyncio.subprocess.Process]:
    """In the working folder, with all of our variables."""
    yield await asyncio.create_subprocess_exec(*words, env={**os.environ, **variables}, **PIPES)


async def run_command(
    words: Sequence[str], variables: Mapping[str, str], told: Mapping[str, Any], *, start: Start = start, most_output: int | None = None
) -> dict[str, Any]:
    """What the process said at its end: `reward` and `answer`, as far as the last line of JSON that it printed has them.

    RUBATO_TASK_FILE names a file with `told`. Raises AgentEnded where it can't be started, prints more than `most_output` bytes, or ends
    with another code than 0. Whatever ends this, the process and its group are killed.
    """
    with tempfile.TemporaryDirectory(prefix=f"{PLACES}{os.getpid()}-") as place:
        file = Path(place, "task.json")
        file.write_text(json.dumps(told))
        file.chmod(0o644)  # in a folder of our own: a sandbox that shows it may have another user id
        try:
            async with start(words, {**variables, TASK_FILE: str(file)}, file) as process:
                out, err = await _heard(process, most_output)
        except OSError as error:
            raise AgentEnded(f"can't be started: {error.strerror}: {words[0]}") from error
    if out.is_flood or err.is_flood:
        raise AgentEnded(f"printed more than {most_output:,} bytes")
    if process.returncode:
        raise AgentEnded(f"ended with {process.returncode}: {clean(err.last_line or out.last_line or 'it said nothing')}")
    found = _result_in(out.text)
    if not found and out.is_cut:
        raise AgentEnded(
            f"printed a last line of more than {TAIL:,} bytes, of which no result can be read: print that in a line of its own"
        )
    return found


async def _heard(process: asyncio.subprocess.Process, most_output: int | None) -> tuple["_Tail", "_Tail"]:
    """Its outputs, once it has ended."""
    kill = partial(_kill_group, process.pid)
    out, err = _Tail(most_output, kill), _Tail(most_output, kill)
    async with asyncio.TaskGroup() as tasks:
        reading = [tasks.create_task(tail.read(stream)) for tail, stream in ((out, process.stdout), (err, process.stderr))]
        try:
            await until_gone(process.pid)
        finally:
            kill()
        ended = tasks.create_task(process.wait())  # which waits for its outputs too
        await asyncio.wait((ended, *reading), timeout=AFTER_S)
        for each in (ended, *reading):
            each.cancel()
    return out, err


def clear_places() -> None:
    """Remove what agents of processes that were killed had been shown, the keys of their sessions among it. Blocks."""
    for place in Path(tempfile.gettempdir()).glob(f"{PLACES}*"):
        pid = place.name.removeprefix(PLACES).partition("-")[0]
        if pid.isdecimal() and not os.path.exists(f"/proc/{pid}"):
            shutil.rmtree(place, ignore_errors=True)


def _kill_group(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


class _Tail:
    """The last bytes of a stream; `on_flood` is called where it has more than `most`."""

    def __init__(self, most: int | None, on_flood: Callable[[], None]) -> None:
        self._kept = bytearray()
        self._num, self._most, self._on_flood = 0, most, on_flood
        self.is_flood = False

    async def read(self, stream: asyncio.StreamReader | None) -> None:
        """To its end."""
        while stream is not None and (piece := await stream.read(TAIL)):
            self._kept += piece
            del self._kept[:-TAIL]
            self._num += len(piece)
            if self._most is not None and self._num > self._most:
                self.is_flood = True
                self._on_flood()

    @property
    def is_cut(self) -> bool:
        """The last line is longer than what is kept."""
        return self._num > TAIL and b"\n" not in self._kept.rstrip()

    @property
    def text(self) -> str:
        return self._kept.decode(errors="replace")

    @property
    def last_line(self) -> str:
        return next((line.strip() for line in reversed(self.text.splitlines()) if line.strip()), "")[:500]


def _result_in(text: str) -> dict[str, Any]:
    """Of the last line that is a JSON object with `reward` or `answer`: those of the two that are not null."""
    for line in reversed(text.splitlines()):
        if line.lstrip().startswith("{"):
            with suppress(ValueError, RecursionError):
                found = json.loads(line)
                if RESULT & found.keys():
                    return {key: found[key] for key in RESULT & found.keys() if found[key] is not None}
    return {}


def main(target: str) -> None:
    """Call the function at `target` with the task of RUBATO_TASK_FILE, and print what it returns as `run_command` reads it."""
    task = SimpleNamespace(**json.loads(Path(os.environ[TASK_FILE]).read_text()))
    said = load_configured(target, key="env.agent")(task)
    if inspect.iscoroutine(said):
        said = asyncio.run(said)
    told = json.dumps({"answer" if isinstance(said, str) else "reward": said})
    if len(told) >= TAIL:
        sys.exit(f"it returned {len(told):,} bytes, and an answer may have {TAIL:,}")
    print(f"\n{told}", flush=True)  # noqa: T201 - for run_command; behind whatever the function left unfinished


if __name__ == "__main__":
    main(sys.argv[1])
