"""Runs user code in worker processes that may be killed at any time, so that no user mistake reaches an actor."""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from rubato.runtime.pool.errors import NoWorker, PoolError, WorkerKilled
from rubato.runtime.pool.process import WorkerProcess
from rubato.runtime.pool.sandbox import WorkerLimits, shortcoming
from rubato.runtime.pool.values import Traits, decode, encode_call

if TYPE_CHECKING:
    from rubato.runtime.bubblewrap import SandboxWall

SHARE = 0.5
"""Of the memory that is left, what workers may take: engines, trainers and files need some too."""

PROC, CGROUP = Path("/proc"), Path("/sys/fs/cgroup")

GROW_S = 0.1
"""Calls that wait for less than a process takes to start gain little by one more."""

EACH_SLACK_S = 5.0
"""Beyond the time that calls of `apply_each` have, for their worker to end those that hang."""


class WorkerPool:
    """Worker processes that host instances of user classes and call user functions.

    An instance stays on the worker it was built on; a worker runs its calls one after another. A call that outlives its
    deadline has its worker killed; the next call that needs a worker starts a new one. Nothing here bounds how many calls
    wait: callers do, by their own concurrency. User code's output goes to `on_output`, line by line.

    It may grow, from `workers` to `most`: by one whenever calls have waited for `GROW_S` and half of the memory that is left has room for
    another one as large as the largest. It does not shrink. `on_size` is told the new number. Workers start behind `wall`, if there is one.
    """

    def __init__(
        self,
        *,
        workers: int = 1,
        most: int = 0,
        limits: WorkerLimits | None = None,
        on_output: Callable[[str], None] | None = None,
        on_size: Callable[[int], None] | None = None,
        wall: "SandboxWall | None" = None,
    ) -> None:
        self._wall = wall
        self._most = max(workers, most)
        self._on_size = on_size
        self._looking: asyncio.TimerHandle | None = None
        self._growing: asyncio.Task[None] | None = None
        self._limits = limits or WorkerLimits()
        self._on_output = on_output or _ignore
        self._preloaded: dict[str, float] = {}
        self._warned = False
        self._workers: list[WorkerProcess | None] = [None] * workers
        self._ended: set[WorkerProcess] = set()
        self._homes: dict[str, WorkerProcess] = {}
        self._starting = asyncio.Lock()
        self._closed = False

    async def start(self) -> None:
        """Spawn every worker; optional, since a call spawns what it needs. Raises NoWorker when the system refuses."""
        async with self._starting:
            if not self._warned and (text := shortcoming()):
                self._on_output(text)
            self._warned = True
            for index in range(len(self._workers)):
                await self._start(index)

    async def close(self) -> None:
        """Kill every worker and wait for its end; calls in flight end as WorkerKilled."""
        self._closed = True
        if self._looking is not None:
            self._looking.cancel()
        if self._growing is not None:
            await asyncio.wait([self._growing])
        self._ended.update(worker for worker in self._workers if worker is not None)
        self._workers = [None] * len(self._workers)
        self._homes.clear()
        for worker in self._ended:
            worker.kill("the pool was closed")
        while self._ended:  # one that is cancelled here may be called again
            worker = next(iter(self._ended))
            await worker.gone()
            self._ended.discard(worker)

    async def inspect(self, target: str, *, deadline_s: float, attributes: Sequence[str] = ()) -> Traits:
        """Load `target` in a worker and say what it is. Raises TargetMissing, or what `apply` raises."""
        worker = await self._least_loaded()
        payload = msgspec.msgpack.encode(attributes)
        return Traits(**decode(await worker.request("check", target, "", payload, deadline_s)))

    async def preload(self, target: str, *, deadline_s: float, attributes: Sequence[str] = ()) -> Traits:
        """Load `target` in every worker, and in each that is started later: a call's own deadline is not spent on imports. Says what it is.

        Raises as `inspect`.
        """
        await self.start()
        workers = [worker for worker in self._workers if worker is not None]
        payload = msgspec.msgpack.encode(attributes)
        replies = [worker.request("check", target, "", payload, deadline_s) for worker in workers]
        found = b""
        for ended in await asyncio.gather(*replies, return_exceptions=True):
            if isinstance(ended, BaseException):
                raise ended
            found = ended
        self._preloaded[target] = deadline_s
        return Traits(**decode(found))

    async def apply(self, target: str, payload: bytes, *, deadline_s: float, took: Callable[[float], object] | None = None) -> bytes:
        """Call the function `target` with `encode_call(...)`; returns its result for `decode`.

        `took` is told the seconds that it ran, without the start of a process, imports, and calls before it. Coroutine functions are awaited. Raises the errors of `rubato.runtime.pool.errors`.
        """
        worker = await self._least_loaded()
        return await worker.request("apply", target, "", payload, deadline_s, took)

    async def apply_each(
        self, target: str, payloads: Sequence[bytes], *, deadline_s: float, told: Callable[[int, bytes | PoolError], object]
    ) -> None:
        """As `apply` of each of `payloads`, all at once and each in a process of its own, within `deadline_s` together.

        `told` gets the place of each and its result, or why it has none, as it ends: one that hangs or dies costs no other. Raises nothing.
        """
        left = dict.fromkeys(range(len(payloads)))

        def part(index: int, result: bytes | PoolError) -> None:
            if left.pop(index, self) is None:
                told(index, result)

        whole = msgspec.msgpack.encode((deadline_s, payloads))
        ended: PoolError = WorkerKilled("its process ended before")
        try:
            worker = await self._least_loaded()
            await worker.request("each", target, "", whole, deadline_s + EACH_SLACK_S, part=part)
        except PoolError as error:
            ended = error
        for index in left:
            told(index, ended)

    async def build(self, instance: str, target: str, payload: bytes, *, deadline_s: float) -> None:
        """Construct the class `target` as `instance`, on the worker with the least to do. Raises as `apply`."""
        worker = await self._least_loaded()
        worker.instances.add(instance)
        self._homes[instance] = worker
        built = False
        try:
            await worker.request("build", target, instance, payload, deadline_s)
            built = True
        finally:
            if not built:
                self.drop(instance)

    async def call(
        self, instance: str, method: str, payload: bytes, *, deadline_s: float, began: Callable[[], object] | None = None
    ) -> bytes:
        """Call a method of `instance`, as `apply` does. Raises WorkerKilled too where its worker ended in the meantime.

        `began` is called once its worker is through with the calls before.
        """
        worker = self._homes.get(instance)
        if worker is None or not worker.alive:
            self._homes.pop(instance, None)
            raise WorkerKilled("its process ended during another call")
        reply = worker.request("call", method, instance, payload, deadline_s, began=began)
        self._look_later()
        return await reply

    @property
    def size(self) -> int:
        """Workers that there are, or were before they ended."""
        return len(self._workers)

    def is_crowded(self, instance: str) -> bool:
        """Whether one built anew would share its worker with fewer others."""
        worker = self._homes.get(instance)
        others = [len(each.instances) for each in self._workers if each is not None and each.alive]
        return worker is not None and worker.alive and len(worker.instances) > min(others) + 1

    def abandon(self, instance: str, *, deadline_s: float) -> None:
        """Let go of `instance` while it may be at work, without waiting: its `close` is called once it is through.

        A worker that hosts nothing else is killed instead, so that its work ends now.
        """
        worker = self._homes.pop(instance, None)
        if worker is None or not worker.alive:
            return
        if worker.instances == {instance}:
            worker.kill("no caller waits for its result")
        else:
            worker.request("call", "close", instance, encode_call(), deadline_s).add_done_callback(_seen)
            worker.drop(instance)

    def has(self, instance: str) -> bool:
        """Whether `instance` was built and its worker lives."""
        worker = self._homes.get(instance)
        return worker is not None and worker.alive

    def drop(self, instance: str) -> None:
        """Forget `instance`; unknown ones are ignored. No method of it is called."""
        worker = self._homes.pop(instance, None)
        if worker is not None:
            worker.drop(instance)

    async def _least_loaded(self) -> WorkerProcess:
        if any(worker is None or not worker.alive for worker in self._workers):
            await self.start()
        return min((worker for worker in self._workers if worker is not None), key=lambda worker: worker.load)

    def _look_later(self) -> None:
        """Look for calls that wait, unless that is going to be done."""
        idle = self._looking is None and self._growing is None and not self._closed
        if idle and self.size < self._most and self._waiting(asyncio.get_running_loop().time()):
            self._looking = asyncio.get_running_loop().call_later(GROW_S, self._look)

    def _look(self) -> None:
        self._looking = None
        loop = asyncio.get_running_loop()
        if self._waiting(loop.time() - GROW_S):
            self._growing = loop.create_task(self._grow())
        else:
            self._look_later()

    async def _grow(self) -> None:
        """By one, and look again."""
        used = [each.pid for each in self._workers if each is not None and each.alive]
        try:
            if has_room(used):
                async with self._starting:
                    self._workers.append(None)
                    await self._start(self.size - 1)
                if self._on_size is not None:
                    self._on_size(self.size)
            else:
                self._most = self.size
        except NoWorker as error:
            self._workers.pop()
            self._most = self.size
            self._on_output(f"no worker more than the {self.size} that there are: {error}")
        finally:
            self._growing = None
        self._look_later()

    def _waiting(self, since: float) -> bool:
        return any(worker is not None and worker.waiting(since) for worker in self._workers)

    async def _start(self, index: int) -> None:
        if self._closed:
            raise NoWorker("the pool was closed")
        old = self._workers[index]
        if old is not None and old.alive:
            return
        if old is not None:
            self._ended.add(old)
            self._homes = {key: home for key, home in self._homes.items() if home is not old}
        self._ended = {worker for worker in self._ended if not worker.over}
        worker = WorkerProcess(self._limits, self._on_output, self._wall)
        await worker.start()
        if self._closed:
            worker.kill("the pool was closed")
            await worker.gone()
            raise NoWorker("the pool was closed")
        self._workers[index] = worker
        for target, deadline_s in self._preloaded.items():
            # Calls sent from now on wait behind it. How it ends is for the call that needs the target to say.
            worker.request("check", target, "", b"", deadline_s).add_done_callback(_seen)


def _ignore(_: str) -> None:
    return None


def _seen(reply: "asyncio.Future[bytes]") -> None:
    """Take note of an exception, or its loss would be reported."""
    if not reply.cancelled():
        reply.exception()


def has_room(pids: Sequence[int], proc: Path = PROC, cgroup: Path = CGROUP) -> bool:
    """Whether one more process tree as large as the largest below `pids` fits; True where the system does not tell."""
    left, most = left_bytes(proc, cgroup), max((own_bytes(pid, proc) for pid in pids), default=0)
    return left is None or most <= SHARE * left


def own_bytes(pid: int, proc: Path = PROC) -> int:
    """Memory of `pid` and all below it that would be free without them (PSS)."""
    try:
        lines = (proc / str(pid) / "smaps_rollup").read_text().splitlines()
        children = (proc / str(pid) / "task" / str(pid) / "children").read_text().split()
    except OSError:  # it ended, or the system does not tell
        return 0
    own = next((int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:")), 0)
    return own + sum(own_bytes(int(child), proc) for child in children)


def left_bytes(proc: Path = PROC, cgroup: Path = CGROUP) -> int | None:
    """What can be had without swapping, and before a container meets its limit; None where neither is known."""
    found: list[int] = []
    try:
        lines = (proc / "meminfo").read_text().splitlines()
        found += [int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")]
    except OSError:
        pass
    try:
        limit, used = ((cgroup / name).read_text().strip() for name in ("memory.max", "memory.current"))
        found += [] if limit == "max" else [max(0, int(limit) - int(used))]
    except OSError:
        pass
    return min(found, default=None)
