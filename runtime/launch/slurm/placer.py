"""The placer of a Slurm allocation: each placed host is one step of it, held by its `srun`, which is a child of the launcher."""

import asyncio
import itertools
import os
import re
import shutil
import signal
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

from rubato.runtime.config import Config
from rubato.runtime.config.sections import DEVICES
from rubato.runtime.host import Ending
from rubato.runtime.launch.card import read_card
from rubato.runtime.launch.children import STDERR_TAIL, die_with_parent
from rubato.runtime.launch.folder import make_private
from rubato.runtime.launch.placer import HostSpec, JoinCommand, NotPlaced
from rubato.runtime.launch.slurm.groups import groups_of

STEP = "rubato.runtime.launch.slurm.step"

BEAT_S = 2.0
"""How often a step hears that its launcher lives: Slurm does not end a step whose srun is lost, and its stdin does not either."""
SPARE_S = 5.0
"""Longer than `run.lease_s` without a beat a step ends its command, which should have left by itself."""
ROOM_S = 5
"""A node that has room by our own count may still clean up after a step of before."""
END_S = 15.0
"""For an srun to end whose step was cancelled; where the step's node is gone it waits for more."""
LOOK_S = 0.2
"""How often to look whether a step of an earlier launcher is gone, of which Slurm tells others no end."""

MOST_UNREAD = 4096
"""Bytes that wait for an srun; what would be more is not said."""

MOST_BANNER, UP_WORDS = 100, 3
"""Lines that a site may have its tasks print before a step says `up STEP NODE`."""

NOISE = ("srun:", "slurmstepd:")
"""How Slurm's own lines begin among those of a command."""


class SlurmNode(NamedTuple):
    """A node of the allocation, as Slurm describes it."""

    name: str
    cpus: int
    gpus: int
    labels: frozenset[str]
    up: bool

    def lacks(self, spec: HostSpec) -> bool:
        """Whether it could not hold such a host if it held nothing else."""
        return spec.cpus > self.cpus or spec.gpus > self.gpus or not self.labels.issuperset(spec.labels)

    def has_room(self, spec: HostSpec, held: Sequence[HostSpec]) -> bool:
        """Whether it can hold one more beside those that it holds. One that asks for no cores has them all."""
        every = (*held, spec)
        shared = all(each.cpus for each in every) and sum(each.cpus for each in every) <= self.cpus
        return self.up and (shared or not held) and sum(each.gpus for each in every) <= self.gpus

    def __str__(self) -> str:
        gpus = [f"{self.gpus} GPUs"] if self.gpus else []
        return f"{self.name} ({', '.join([f'{self.cpus} cores', *gpus, *sorted(self.labels)])})"


class SlurmPlacer:
    """A HostPlacer within the allocation of `launch.address`, a job's id; auto: the one that the launcher runs in.

    In a heterogeneous job the kinds of hosts lie as `rubato slurm` laid them: see `groups_of`. The launcher's own node is the last choice.
    """

    def __init__(self, config: Config, folder: Path) -> None:
        self._job = _allocation(config)
        self._groups = groups_of(config)
        self._name = f"rubato-{read_card(folder).id}"
        """Of each step: what an earlier launcher of the run left is known by it."""
        self._folder, self._patience_s = folder / "hosts", config.run.lease_s + SPARE_S
        self._on: dict[str, list[HostSpec]] = defaultdict(list)
        """Node → what it holds, or is about to."""
        self._hosts: set[SlurmHost] = set()
        self._numbers = itertools.count(1)
        self._cleared = False
        self._clearing = asyncio.Lock()

    @staticmethod
    def problems(config: Config) -> list[str]:
        """What a launch is refused for."""
        why = "" if _allocation(config).isdecimal() else "there is none here: SLURM_JOB_ID is not set"
        if why and config.launch.address != "auto":
            why = f"launch.address={config.launch.address} is no job's id"
        if not why and shutil.which("srun") is None:
            why = "srun is not on the PATH"
        return [f"launch.backend=slurm needs an allocation, and {why}. Make a script with: rubato slurm CONFIG --out job.sh"] if why else []

    async def place(self, spec: HostSpec, join: JoinCommand) -> "SlurmHost":
        async with self._clearing:
            if not self._cleared:
                await self._end_earlier()
                self._cleared = True
        component, group, nodes = await self._nodes(spec)
        able = [node for node in nodes if not node.lacks(spec)]
        if not able:
            raise NotPlaced(
                f"no node of the allocation {self._job} can hold a host of {spec.name}, which needs {_needs(spec)}: it has "
                f"{', '.join(map(str, nodes)) or 'none left'}. Change launch.hosts.{spec.name}, or ask Slurm for other nodes."
            )
        own, why = os.environ.get("SLURMD_NODENAME", ""), ""
        able.sort(key=lambda node: (node.name == own, len(self._on[node.name])))
        for node in able:
            if node.has_room(spec, self._on[node.name]):
                try:
                    return await self._step(spec, join, component, group, node.name, f"--immediate={ROOM_S}")
                except NotPlaced as error:
                    why = str(error)
        if why and not why.endswith("Requested nodes are busy"):
            raise NotPlaced(f"no node of the allocation {self._job} takes a host of {spec.name}, which needs {_needs(spec)}. srun: {why}.")
        labels = [f"--constraint={'&'.join(spec.labels)}"] if spec.labels else []
        return await self._step(spec, join, component, group, "", *labels)

    async def close(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            for host in tuple(self._hosts):
                tasks.create_task(host.release())

    # -- parts --------------------------------------------------------------------------------------------------

    async def _step(self, spec: HostSpec, join: JoinCommand, component: str, group: int, node: str, *more: str) -> "SlurmHost":
        """Start `join` on `node`, or on any that has room first. Raises NotPlaced with what srun said."""
        make_private(self._folder)
        log = self._folder / f"{spec.name}.{next(self._numbers)}.log"
        options = [
            f"--jobid={self._job}", f"--het-group={group}", f"--job-name={self._name}", "--nodes=1", "--ntasks=1", "--mem=0",
            f"--gres={f'gpu:{spec.gpus}' if spec.gpus else 'none'}", "--cpu-bind=none", "--mpi=none", "--quiet", "--export=ALL", *more,
            *([f"--nodelist={node}"] if node else []), *([f"--cpus-per-task={spec.cpus}", "--exact"] if spec.cpus else []),
        ]  # fmt: skip
        if component == self._job:
            options.remove(f"--het-group={group}")
        command = [sys.executable, "-m", STEP, str(self._folder), str(self._patience_s), join.module, *join.arguments]
        with log.open("wb") as file:
            process = await asyncio.create_subprocess_exec(
                "srun", *options, *command, cwd=self._folder, env=_environment(), preexec_fn=die_with_parent, start_new_session=True,
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=file,
            )  # fmt: skip
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(f"{join.token}\n".encode())
        self._on[node].append(spec)
        try:
            said = await _up(process.stdout)
            if not said:
                await process.wait()
        except (asyncio.CancelledError, NotPlaced):
            process.terminate()
            await _end(process)
            await _drained(process.stdout)
            raise
        finally:
            self._on[node].remove(spec)
        if not said:
            why, last = _last(log, of_slurm=True) or "its step ended at once", _last(log)
            raise NotPlaced(why if not last or why in last else f"{why}; it said: {last[:300]}")
        host = SlurmHost(process, f"{component}.{said[1]}", log, partial(self._released, said[2], spec))
        self._on[said[2]].append(spec)
        self._hosts.add(host)
        return host

    def _released(self, node: str, spec: HostSpec, host: "SlurmHost") -> None:
        if host in self._hosts:
            self._hosts.remove(host)
            self._on[node].remove(spec)

    async def _nodes(self, spec: HostSpec) -> tuple[str, int, list[SlurmNode]]:
        """The id of the job that has the hosts of `spec`, its number in a heterogeneous one, and the nodes that are left to it."""
        try:
            told = await _output("squeue", "-h", "-j", self._job, "-o", "%i|%A|%N")
        except NotPlaced as error:
            raise NotPlaced(f"Slurm has no job {self._job}, which SLURM_JOB_ID or launch.address names: {error}.") from None
        lines = [line.split("|") for line in told.splitlines()]
        parts = {int(name.partition("+")[2] or 0): (job, names) for name, job, names in lines}
        if not parts:
            raise NotPlaced(f"the allocation {self._job} is over.")
        num = 1 + max(self._groups.values(), default=0)
        if len(parts) not in (1, num):
            raise NotPlaced(
                f"the allocation {self._job} has {len(parts)} groups of nodes, and launch.hosts needs {num}: make it with rubato slurm."
            )
        group = self._groups.get(spec.name, 0) if len(parts) > 1 else 0
        component, names = parts[group]
        lines = (await _output("sinfo", "-h", "-N", "-n", names, "-o", "%N|%c|%f|%G|%t")).splitlines() if names else []
        return component, group, list({(node := node_of(line)).name: node for line in lines}.values())

    async def _end_earlier(self) -> None:
        """End by its name what an earlier launcher of this run left."""
        told = set[str]()
        while steps := {line.partition("|")[0] for line in await self._steps() if line.partition("|")[2] == self._name}:
            if new := steps - told:
                await _output("scancel", *sorted(new), check=False)  # one of them may have ended since
                told |= new
            await asyncio.sleep(LOOK_S)

    async def _steps(self) -> list[str]:
        return (await _output("squeue", "-h", "--steps", "--me", "-o", "%i|%j")).splitlines()


class SlurmHost:
    """A PlacedHost: a step, with which ends all that it started."""

    def __init__(self, process: asyncio.subprocess.Process, name: str, log: Path, released: Callable[["SlurmHost"], object]) -> None:
        self.id = name
        self._process, self._log, self._released = process, log, released
        self._ending: Ending | None = None
        self._reading = asyncio.Lock()
        self._cancelled = False
        self._loop = asyncio.get_running_loop()
        self._beat()

    async def ended(self) -> Ending:
        await self._process.wait()
        async with self._reading:
            if self._ending is None:
                self._ending = await self._read()
        return self._ending

    def signal(self, number: signal.Signals) -> None:
        self._write(f"{int(number)}\n")

    async def release(self) -> None:
        if self._process.returncode is None:
            self._cancelled = True
            await _output("scancel", "--quiet", self.id, check=False)
            await _end(self._process)
        self._released(self)

    async def _read(self) -> Ending:
        assert self._process.stdout is not None
        words = (await self._process.stdout.read()).split()
        if b"ended" in words:
            return Ending.of(int(words[-1]), _last(self._log)[:300], str(self._log))
        if self._cancelled:
            return Ending.of(-signal.SIGKILL, _last(self._log)[:300], str(self._log))
        return Ending("lost", f"srun: {_last(self._log, of_slurm=True)}", str(self._log), lost=True)

    def _beat(self) -> None:
        if self._process.returncode is None:
            self._write("\n")
            self._loop.call_later(BEAT_S, self._beat)

    def _write(self, line: str) -> None:
        pipe = self._process.stdin
        assert pipe is not None
        if self._process.returncode is None and pipe.transport.get_write_buffer_size() < MOST_UNREAD:
            pipe.write(line.encode())


# -- Slurm's commands ------------------------------------------------------------------------------------------------


def _allocation(config: Config) -> str:
    """Its job's id, as it is given."""
    return os.environ.get("SLURM_JOB_ID", "") if config.launch.address == "auto" else config.launch.address


def node_of(line: str) -> SlurmNode:
    """A node from a line of `sinfo -o %N|%c|%f|%G|%t`."""
    name, cpus, features, resources, state = line.split("|")
    gpus = [int(found[1]) for found in re.finditer(r"(?:^|,)gpu(?::[^:,(]+)??:(\d+)", resources)]
    return SlurmNode(name, int(cpus), sum(gpus), frozenset(features.split(",")) - {"(null)"}, state in ("idle", "alloc", "mix"))


def _needs(spec: HostSpec) -> str:
    asked = {"GPUs": spec.gpus, "cores": spec.cpus}
    return ", ".join([*(f"{num} {what}" for what, num in asked.items() if num), *spec.labels]) or "a node"


def _environment() -> dict[str, str]:
    """What this job has of Slurm and of GPUs is not what its steps have."""
    kept = {name: value for name, value in os.environ.items() if name == "SLURM_CONF" or not name.startswith("SLURM")}
    kept.pop(DEVICES, None)
    return {**kept, "PYTHONSAFEPATH": "1"}


async def _output(*command: str, check: bool = True) -> str:
    """What a command of Slurm prints. Raises NotPlaced with its error."""
    process = await asyncio.create_subprocess_exec(
        *command, env=_environment(), preexec_fn=die_with_parent,
        stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        out, err = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode and check:
        raise NotPlaced((err or out).decode(errors="replace").strip().rpartition("\n")[2] or f"{command[0]} failed")
    return out.decode(errors="replace").strip()


async def _up(lines: asyncio.StreamReader) -> list[str]:
    """What a step says once its command runs, behind lines of the site's own (a TaskProlog's banner); empty where it ends before.

    Raises NotPlaced after MOST_BANNER of these.
    """
    for _ in range(MOST_BANNER):
        with suppress(ValueError):  # a line longer than the reader takes
            line = (await lines.readline()).decode(errors="replace")
            if not line:
                return []
            if len(words := line.split()) == UP_WORDS and words[0] == "up":
                return words
    raise NotPlaced(f"its step printed {MOST_BANNER} lines before it was up: have what the site runs before a task (TaskProlog) print less")


async def _drained(lines: asyncio.StreamReader) -> None:
    """Read what is left of a process that has ended: a pipe that is not read to its end is not closed."""
    with suppress(TimeoutError):
        async with asyncio.timeout(END_S):
            while await lines.read(1 << 16):
                pass


async def _end(process: asyncio.subprocess.Process) -> None:
    """Wait for an srun whose step was cancelled, and kill it where that takes too long."""
    with suppress(TimeoutError):
        async with asyncio.timeout(END_S):
            await process.wait()
    if process.returncode is None:
        process.kill()
        await process.wait()


def _last(log: Path, *, of_slurm: bool = False) -> str:
    """The last that the command said, or the last that Slurm said of it."""
    try:
        lines = log.read_bytes()[-STDERR_TAIL:].decode(errors="replace").strip().splitlines()
    except OSError:
        return ""
    found = [line.strip() for line in lines if line.startswith(NOISE) == of_slurm and line.strip()]
    return re.sub(r"^(\w+: )+(error: )?", "", found[-1]).rstrip(".") if of_slurm and found else found[-1] if found else ""
