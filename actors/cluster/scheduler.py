"""Scheduler: the one actor of a cluster. It keeps the book of its jobs, gives each a place, starts it there and sees it end.

What it decides it writes before it says so or acts on it; jobs are processes of their own, which it finds again when it is started again.
"""

import asyncio
import hmac
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec

from rubato.actors.cluster.book import LOOKED_AT, PROFILED, Book, JobRecord, Spot, longest
from rubato.actors.cluster.cycles import Cycle, Cycles
from rubato.actors.cluster.job import files
from rubato.actors.cluster.lives import JobLife, opened
from rubato.actors.cluster.needs import check_hosts, limit_over, on_host, overrides, prepared
from rubato.actors.cluster.permits import Permits
from rubato.actors.cluster.pools import CLUSTER_HOST, HOST_CLASS, SchedulerSection, labels_of, rollout_pool, training_pool
from rubato.actors.cluster.token import read_token
from rubato.actors.messages.cluster import CancelJob, JobAccepted, JobRefused, StopJobs, SubmitJob
from rubato.runtime.actor import Actor, handler
from rubato.runtime.config import ActorConfig, BusSection
from rubato.runtime.config import Config as Job
from rubato.runtime.errors import ExitCode
from rubato.runtime.launch.shared import open_shared
from rubato.runtime.monitor.source import RowTail
from rubato.runtime.observe.trace import wall_s
from rubato.runtime.store.redis import RedisStore
from rubato.runtime.store.store import Fence, StoreUnavailable

if TYPE_CHECKING:
    from rubato.runtime.kernel import Kernel

Reply = JobAccepted | JobRefused
MAX_CONFIG_BYTES = 1 << 20
LISTEN_S = 10.0
AGAIN_S = 1.0


class ClusterScheduler(Actor):
    """Jobs are at `jobs/NAME` in the cluster's Store, written under its incarnation: a scheduler that was replaced changes nothing."""

    role: ClassVar[str] = "scheduler"
    least: ClassVar[int] = 1
    most: ClassVar[int] = 1

    class Config(ActorConfig):
        scheduler: SchedulerSection
        bus: BusSection = BusSection()

    config: Config

    @classmethod
    def brings(cls, tree: Mapping[str, Any]) -> Mapping[str, Any]:
        return {CLUSTER_HOST: {"class": HOST_CLASS, "count": 0, "restarts": 100}} if _names_hosts(tree) else {}

    @classmethod
    def check(cls, job: Job) -> None:
        if any(job.section("scheduler").rollout.hosts) and not job.bus.host:
            raise ValueError(
                "scheduler.rollout.hosts names hosts that join the cluster: set bus.host, this host's address as they reach it"
            )

    def __init__(self, config: Any, kernel: "Kernel") -> None:
        super().__init__(config, kernel)
        self._section = self.config.scheduler
        self._book, self._wake = Book(self._section), asyncio.Event()

    async def on_start(self) -> None:
        """Find what runs; what should and doesn't comes back as a new arrival."""
        self._token = read_token(self.run.folder)
        self._shared: RedisStore = open_shared(self.run.folder)
        self._lives: dict[str, JobLife] = {}
        self._rows: dict[str, RowTail] = {}
        self._stopping, self._writing = False, asyncio.Lock()
        self._idle = asyncio.Event()
        self._wake.set()
        found = (await self.store.scan("jobs/")).values()
        self._book = Book(self._section, [msgspec.msgpack.decode(value, type=JobRecord) for value in found])
        self._look_at_hosts()
        self._cycles = Cycles(frozenset(map(rollout_pool, range(self._section.rollout.nodes))), wall_s())
        for record in list(self._book.jobs.values()):
            if record.holds:
                await self._adopt(record)
        self.spawn(self._place_jobs(), name="scheduler.place")
        for pool in self._pools():
            self.spawn(self._listen(pool), name=f"scheduler.{pool}")

    async def on_peers(self, joined: tuple[str, ...], left: tuple[str, ...]) -> None:
        """A host may have come, on which a job waits for a place."""
        self._look_at_hosts()
        self._wake.set()

    async def on_stop(self) -> None:
        """Jobs go on."""
        await self._shared.close()

    # -- what users ask ------------------------------------------------------------------------------------------

    @handler
    async def submitted(self, request: SubmitJob) -> Reply:
        known = self._book.jobs.get(request.name)
        if why := self._refusal(request, known):
            return JobRefused(why)
        if known is not None:
            return JobAccepted(f"{known.why}; {known.promise}")
        record = JobRecord(
            name=request.name, id=request.id, number=await self.store.increment("arrivals"), cwd=request.cwd,
            slo=request.slo or self._section.slo, needs=request.needs,
        )  # fmt: skip
        try:
            self._book.check(record)
        except ValueError as error:
            return JobRefused(f"{error}.")
        if self._section.rollout.hosts and (why := await self.offload(check_hosts, request.name, request.config)):
            return JobRefused(why)
        spot = self._book.spot(record)
        record = msgspec.structs.replace(record, why=spot.why)
        await self.offload(self._keep_config, request.name, request.config)
        await self._write(record)
        self._book.jobs[record.name] = record
        self._wake.set()
        return JobAccepted(f"{spot.why}; {record.promise}")

    @handler
    async def cancelled(self, request: CancelJob) -> Reply:
        record = self._book.jobs.get(request.name)
        if not self._is_user(request.token):
            return JobRefused(WRONG_TOKEN)
        if record is None:
            return JobRefused(f"{request.name} is no job of this cluster. Its jobs: {', '.join(self._book.jobs) or 'none'}.")
        if record.over:
            return JobRefused(f"{request.name} is over already: {record.why}.")
        if record.state == "queued":
            await self._record(msgspec.structs.replace(record, state="cancelled", why="cancelled before it ran"))
        elif record.state != "cancelling":
            await self._leave(request.name, "cancelling", "cancelled: it drains and saves")
        return JobAccepted(self._book.jobs[request.name].why)

    @handler(concurrency=4, outlives_asker=True)
    async def stopped(self, request: StopJobs) -> Reply:
        if not self._is_user(request.token):
            return JobRefused(WRONG_TOKEN)
        self._stopping = True
        for record in list(self._book.jobs.values()):
            if record.state == "running":
                await self._leave(record.name, "leaving", "the cluster was stopped: it goes on with the next start")
        while self._lives:
            self._idle.clear()
            await self._idle.wait()
        return JobAccepted("every job is saved")

    def _refusal(self, request: SubmitJob, known: JobRecord | None) -> str:
        """Why it is no submission, if it is none."""
        if not self._is_user(request.token):
            return WRONG_TOKEN
        if self._stopping:
            return "the cluster is being stopped and takes no jobs. Start it again with: rubato cluster start DIR"
        if request.slo and not request.slo >= 1:
            return f"job {request.name} has an SLO of {request.slo:g}: it must be at least 1, its time alone."
        if len(request.config) > MAX_CONFIG_BYTES:
            return f"the config of job {request.name} has {len(request.config)} bytes; at most {MAX_CONFIG_BYTES} are taken."
        if known is not None and known.id != request.id:
            how = f"is {known.state}" if known.over else f"is there already ({known.state})"
            return f"job {request.name} {how} in this cluster. Give this one a name of its own: run.name=NAME"
        return ""

    def _is_user(self, token: str) -> bool:
        return hmac.compare_digest(token.encode(), self._token.encode())

    # -- its jobs ------------------------------------------------------------------------------------------------

    async def _place_jobs(self) -> None:
        """Whenever something has changed, start what has a place."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            for name in [record.name for record in self._book.queue()]:
                record = self._book.jobs[name]
                try:
                    await self._try(record)
                except StoreUnavailable as error:
                    self._book.jobs[name] = record
                    self.log.warning("not_placed", job=name, error=str(error))
                    await asyncio.sleep(AGAIN_S)
                    self._wake.set()
                    break

    async def _try(self, record: JobRecord) -> None:
        if self._stopping or record.state != "queued":  # while another one was placed
            return
        spot = self._book.spot(record)
        if spot.group >= 0:
            await self._begin(record, spot)
        elif spot.why != record.why:
            await self._record(msgspec.structs.replace(record, why=spot.why))

    async def _begin(self, record: JobRecord, spot: Spot) -> None:
        self._cycles.forget(record.name)
        record = msgspec.structs.replace(
            record, state="running", group=spot.group, node=spot.node, why=spot.why, slowdowns=(),
            planned=longest(record.seen) if len(record.seen) >= PROFILED else record.times, starts=record.starts + 1, cycles=0,
            began_s=record.began_s if record.moved else wall_s(),
        )  # fmt: skip
        await self._record(record)
        self.notice(spot.why, good=True)
        try:
            life = await self.offload(self._begin_life, record)
        except OSError as error:
            await self._record(_out(record, "failed", f"can't be started: {error.strerror} ({error.filename})"))
            return
        self._follow(record.name, life)

    async def _adopt(self, record: JobRecord) -> None:
        """Go on with a job that a scheduler before this one started."""
        folder = self._folder(record.name)
        life = JobLife.found(folder, files(folder))
        if life is None:
            gone = JobLife(folder, files(folder))
            if record.state == "running":  # it ended while there was no scheduler: stopped, not cancelled
                self._book.jobs[record.name] = msgspec.structs.replace(record, state="leaving")
            await self._ended(record.name, await gone.ended(), gone.last_words())
            return
        self.log.info("adopted", job=record.name)
        self._follow(record.name, life)

    def _follow(self, name: str, life: JobLife) -> None:
        self._lives[name] = life
        if self._book.jobs[name].state != "running":  # it was to leave, and no scheduler was there to stop it
            life.stop()
        self.spawn(self._until_ended(name, life), name=f"scheduler.job.{name}")

    async def _until_ended(self, name: str, life: JobLife) -> None:
        code = await life.ended()
        await self._ended(name, code, life.last_words())
        if self._lives.get(name) is life:  # it may run again already
            del self._lives[name]
        self._idle.set()
        self._wake.set()

    async def _ended(self, name: str, code: int | None, words: str) -> None:
        """Its group is as it was before it came; whatever was not meant to end comes back."""
        step, turn = await self.offload(last_step, self._folder(name)), await self.store.increment("arrivals")
        self._cycles.forget(name)
        self._rows.pop(name, None)
        job = self._book.jobs[name]
        job = msgspec.structs.replace(job, step=step, crashes=0 if step > job.step else job.crashes)
        if code == ExitCode.DONE:
            job = _out(job, "done", f"done after step {step}")
        elif job.state == "cancelling":
            job = _out(job, "cancelled", f"cancelled after step {step}")
        elif code == ExitCode.INTERRUPTED and job.state == "running":
            job = _out(job, "cancelled", f"stopped by its user after step {step}")
        elif code == ExitCode.REFUSED:
            job = _out(job, "failed", words or "it was refused")
        elif job.state == "leaving" and code == ExitCode.INTERRUPTED:
            job = _out(job, "queued", job.why)
        else:
            job = self._crashed(job, code, words)
        if job.state == "queued":
            job = msgspec.structs.replace(job, number=turn)
        group = self._book.jobs[name].group
        await self._record(job)
        self.notice(f"job {name} is {job.state}: {job.why}", good=job.state == "done")
        if job.over:
            await self._regroup(group)

    def _crashed(self, job: JobRecord, code: int | None, words: str) -> JobRecord:
        """From its last finished step on it is a new arrival, as long as it gets anywhere."""
        crashes = job.crashes + 1
        how = f"exit {code}: {words}" if code is not None else "it was killed"
        job = msgspec.structs.replace(job, crashes=crashes)
        if crashes > self._section.crashes:
            return _out(job, "failed", f"crashed {crashes} times without finishing a step ({how})")
        return _out(job, "queued", f"crashed ({how}); it goes on after step {job.step}")

    async def _regroup(self, changed: int) -> None:
        """Where a job has come or gone: others move where that saves more than it costs."""
        if self._stopping:
            return
        plan = self._book.regrouped(changed)
        for move in plan.moves:
            await self._move(move.job, f"it moves to group {move.target}: {plan.why}", goes=move.target)

    async def _move(self, name: str, why: str, **to: int) -> None:
        """Stopped and saved here, it is started elsewhere; what that takes is time of the job's."""
        self.notice(f"job {name}: {why}")
        self._book.jobs[name] = msgspec.structs.replace(self._book.jobs[name], moved=True, began_s=wall_s(), **to)
        await self._leave(name, "leaving", why)

    async def _leave(self, name: str, state: str, why: str) -> None:
        """Let it drain and save."""
        job = self._book.jobs[name]
        await self._record(msgspec.structs.replace(job, state=state, why=why))
        life = self._lives.get(name)
        if life is not None:
            await self.offload(life.stop, signal.SIGINT)

    def _overrides(self, record: JobRecord) -> list[str]:
        """What differs from place to place."""
        config = files(self._folder(record.name)).config.read_text()
        return [
            f"cluster.rollout_pool={rollout_pool(record.node)}", f"cluster.training_pool={training_pool(record.group)}",
            *overrides(config, self._section, record.node, record.group), *self._where(config, record.node),
        ]  # fmt: skip

    def _where(self, config: str, node: int) -> list[str]:
        pool, own = self._section.rollout, self.directory.find(self.node)
        if not pool.hosts:
            return []
        return on_host(config, pool.host_of(node), self.config.bus.host, own.provides if own is not None else ())

    def _look_at_hosts(self) -> None:
        """Nodes whose hosts are not there take no jobs."""
        pool = self._section.rollout
        if pool.hosts:
            there = frozenset[str]().union(*labels_of(self).values(), {""})
            self._book.away = frozenset(node for node in range(pool.nodes) if pool.host_of(node) not in there)

    def _folder(self, name: str) -> Path:
        return self.run.folder / "jobs" / name

    def _begin_life(self, record: JobRecord) -> JobLife:
        folder = self._folder(record.name)
        try:
            return JobLife.start(folder, files(folder), Path(record.cwd), self._overrides(record))
        except BlockingIOError:  # a scheduler before this one was killed just after it had started it
            return JobLife(folder, files(folder))

    def _keep_config(self, name: str, config: str) -> None:
        kept = files(self._folder(name))
        kept.config.parent.mkdir(mode=0o700, exist_ok=True)
        self._folder(name).parent.mkdir(mode=0o700, exist_ok=True)
        with opened(kept.config) as file:
            file.write(prepared(config, self._section).encode())

    async def _record(self, job: JobRecord) -> None:
        """What is decided from here on goes by it; it is durable once this returns."""
        self._book.jobs[job.name] = job
        async with self._writing:  # the newest, in whatever order writers come
            await self._write(self._book.jobs[job.name])

    async def _write(self, job: JobRecord) -> None:
        fence = Fence("scheduler", self.incarnation)
        await self.store.write({f"jobs/{job.name}": msgspec.msgpack.encode(job)}, fence=fence)

    # -- what permits tell ----------------------------------------------------------------------------------------

    def _pools(self) -> list[str]:
        section = self._section
        return [*map(rollout_pool, range(section.rollout.nodes)), *map(training_pool, range(section.training.nodes))]

    async def _listen(self, pool: str) -> None:
        """Every change of the pool's line."""
        permits, at = Permits(self._shared), 0
        while True:
            try:
                events = await permits.events(pool, at)
                if not events:
                    await self._shared.read(f"permits/{pool}", at, wait_s=LISTEN_S)
            except StoreUnavailable as error:
                self.log.warning("permits_away", pool=pool, error=str(error))
                await asyncio.sleep(AGAIN_S)
                continue
            for index, event in events:
                at = index
                cycle = self._cycles.told(pool, event)
                if cycle is not None:
                    await self._stepped(cycle)

    async def _stepped(self, cycle: Cycle) -> None:
        job = self._book.jobs.get(cycle.job)
        if job is None or job.state != "running":
            return
        tail = self._rows.setdefault(job.name, RowTail(self._folder(job.name) / "metrics.jsonl"))
        rows = await self.offload(tail.read)
        if self._book.jobs[job.name].state != "running":
            return
        profiled = len(job.seen) < PROFILED
        verdict = self._book.stepped(cycle, limit_over(rows[-1], job.needs) if rows else 0.0, wall_s())
        await self._record(self._book.jobs[cycle.job])
        if len(self._book.jobs[cycle.job].seen) == LOOKED_AT + 1:  # from here on one slow step says nothing
            self._wake.set()
        if verdict is None or (verdict.leaves and self._book.jobs[verdict.leaves].state != "running"):
            return
        if not verdict.leaves:
            self.notice(verdict.why, good=True)
            await self._record(msgspec.structs.replace(self._book.jobs[cycle.job], why=verdict.why))
            if profiled and self._book.jobs[cycle.job].times is not None:
                await self._regroup(job.group)
        else:
            leaver = self._book.jobs[verdict.leaves]
            moved = verdict.leaves == cycle.job and len(job.slowdowns) < 2
            await self._move(verdict.leaves, verdict.why, avoids=-1 if moved else leaver.group)
        self._wake.set()


def last_step(folder: Path) -> int:
    """The newest step that the job in `folder` has finished."""
    rows = RowTail(folder / "metrics.jsonl").read()
    return int(rows[-1].get("step", 0)) if rows else 0


def _names_hosts(tree: Mapping[str, Any]) -> bool:
    """Of a config that is not checked yet."""
    section: Any = tree.get("scheduler")
    pool: Any = section.get("rollout") if isinstance(section, dict) else None
    return isinstance(pool, dict) and bool(pool.get("hosts"))


WRONG_TOKEN = "the token is not this cluster's: it is in DIR/token, which its owner alone reads."


def _out(job: JobRecord, state: str, why: str) -> JobRecord:
    """Without a place."""
    return msgspec.structs.replace(job, state=state, why=why, group=-1, node=-1, planned=None)
