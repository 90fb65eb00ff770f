"""The node agent: supervises this host's actors, hears progress, and decides when the job is over."""

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from typing import ClassVar

from bus.errors import AskFailed
from bus.message import Ack
from runtime.actor import Context, handler
from runtime.blobs.hosts import HostBlobs
from runtime.config import ActorConfig, Config
from runtime.launch.local import Death, LocalLauncher
from runtime.launch.outcome import JobOutcome, Screen
from runtime.launch.watch import Watch
from runtime.messages import (
    MOST_ADDED,
    AddActors,
    Added,
    DrainActors,
    Finish,
    NotAdded,
    Notice,
    Progress,
    RestartActors,
    StopJob,
)  # fmt: skip
from runtime.registry import NODE
from runtime.store.errors import StoreUnavailable

DRAIN_LIMIT_S = 25.0
"""A little longer than a kernel's own drain limit: an actor is killed only when its kernel hangs too."""

TELL_S = 5.0
LOOK_S = 1.0
"""How often a host that joined looks for the first one."""

STOP_LIMITS_S = {"interrupted": DRAIN_LIMIT_S, "done": 8.0, "failed": 3.0}
"""By outcome. At the end nothing that still runs is needed; what a failed run did not write down is caught up when it is resumed."""


class NodeAgent(HostBlobs):
    """Lives in the launcher's process; one per host."""

    role: ClassVar[str] = "node"
    Config = ActorConfig

    def __init__(self, config: ActorConfig, context: Context) -> None:
        super().__init__(config, context)
        self.job: Config
        self.screen: Screen
        self.launcher: LocalLauncher
        self.make_launcher: type[LocalLauncher] = LocalLauncher
        self.over: asyncio.Future[JobOutcome] = asyncio.get_running_loop().create_future()
        self._died_at: dict[str, float] = {}
        self._wanted: set[str] = set()
        self._ready: set[str] = set()
        self._draining: set[str] = set()
        self._elsewhere: set[str] = set()
        """Names given to hosts that joined; never given twice."""
        self.all_ready = asyncio.Event()
        self.deaths = 0
        self._watch = Watch(self.waits)

    async def on_start(self) -> None:
        self.spawn(self._serve_launcher(), name="node.launcher")
        follow = self._watch.follow(self.store, self.job.run.watch_s, self._look, self.screen.notice, self.log)
        self.spawn(follow, name="node.watch")

    async def on_peers(self, joined: tuple[str, ...], left: tuple[str, ...]) -> None:
        """Actors came up or went away."""
        self._ready -= set(left)
        for name in joined:
            self._watch.well(name)
            if name in self._wanted:
                self._ready.add(name)
                self._back(name)
        if not self.all_ready.is_set():
            self.screen.actors(len(self._ready), len(self._wanted))
            if self._wanted and self._ready >= self._wanted:
                self.all_ready.set()

    def start_actors(self) -> None:
        """Start every actor of the config."""
        for role, spec in self.job.actors.items():
            for index in range(1, spec.count + 1):
                self.start(f"{role}-{index}")

    def end(self, outcome: JobOutcome) -> None:
        """The first outcome stands."""
        if not self.over.done():
            self.over.set_result(outcome)

    @handler
    async def progress_made(self, message: Progress) -> None:
        self.screen.progress(message)

    @handler
    async def noticed(self, message: Notice) -> None:
        self.screen.notice(message.text, good=message.good)

    @handler
    async def finished(self, message: Finish) -> Ack:
        self.log.info("finished", source=message.source, reason=message.reason, failed=message.failed)
        self.end(JobOutcome("failed" if message.failed else "done", message.reason))
        return Ack()

    @handler
    async def add_actors(self, request: AddActors) -> Added | NotAdded:
        if request.role not in self.job.actors:
            return NotAdded(f"{request.role} is not a role of this run. Its roles are {', '.join(self.job.actors)}.")
        if not 1 <= request.num <= MOST_ADDED:
            return NotAdded(f"can't add {request.num} actors: between 1 and {MOST_ADDED} at a time.")
        most = self.job.actor_class(request.role).most
        running = len(self.launcher.names(request.role)) + sum(_role(name) == request.role for name in self._elsewhere)
        if running + request.num > most:
            return NotAdded(
                f"can't add {request.num} {request.role}: a run has at most {most}, and {running} runs already."
            )
        taken = [int(n.rsplit("-", 1)[1]) for n in self._wanted | self._elsewhere if _role(n) == request.role]
        first = max(taken, default=0) + 1
        names = tuple(f"{request.role}-{first + i}" for i in range(request.num))
        if request.node:
            self._elsewhere |= set(names)
            self.screen.notice(f"{', '.join(names)} joins from {request.node}", good=True)
            return Added(names)
        for name in names:
            self.start(name)
        self.screen.notice(f"{', '.join(names)} added", good=True)
        return Added(names)

    @handler(concurrency=8)
    async def drain_actors(self, request: DrainActors) -> Added | NotAdded:
        away = [n for n in request.names if n in self._elsewhere and self._context.find(n) is not None]
        if away and len(away) == len(request.names):
            return self._too_few(away) or await self._drain_elsewhere(away)
        if refused := self._unknown(request.names) or self._too_few(request.names):
            return refused
        self._draining |= set(request.names)
        self._wanted -= set(request.names)
        async with asyncio.TaskGroup() as tasks:
            for name in request.names:
                tasks.create_task(self.launcher.drain(name, DRAIN_LIMIT_S))
        self.screen.notice(f"{', '.join(request.names)} drained", good=True)
        return Added(request.names)

    @handler(concurrency=8)
    async def restart_actors(self, request: RestartActors) -> Added | NotAdded:
        if unknown := self._unknown(request.names):
            return unknown
        async with asyncio.TaskGroup() as tasks:
            for name in request.names:
                tasks.create_task(self.launcher.restart(name, DRAIN_LIMIT_S))
                self._watch.starting(name)
        self.screen.notice(f"{', '.join(request.names)} restarted", good=True)
        return Added(request.names)

    @handler
    async def stop_job(self, request: StopJob) -> Ack:
        self.end(JobOutcome("interrupted", "stopped by request"))
        if request.now:
            self.launcher.kill_all()
        return Ack()

    async def died(self, death: Death) -> None:
        """A supervised process ended."""
        role = death.name.rsplit("-", 1)[0]
        await self._bury(death.name)
        if death.expected:
            if death.restart_in_s is None:
                self._watch.well(death.name)
            return
        self.deaths += 1
        self._died_at[death.name] = asyncio.get_running_loop().time()
        self.log.warning(
            "died", actor=death.name, how=death.how, after_s=round(death.after_s, 1), sentence=death.sentence
        )
        because = f": {death.sentence}" if death.sentence and not death.how.startswith("signal") else ""
        if death.restart_in_s is None:
            self.end(
                JobOutcome(
                    "failed",
                    f"{death.name} died {death.attempt} times ({death.how}){because}. Log: {self.run.folder}/logs/{death.name}.jsonl",
                )
            )
            return
        self.screen.notice(
            f"{death.name} died ({death.how}) after {death.after_s:.1f} s{because}; restarting in {death.restart_in_s:.1f} s "
            f"({death.attempt} of {death.limit})"
        )
        self._watch.died(
            death.name,
            f"{death.how}{because}; restart {death.attempt} of {death.limit}",
            f"actors.{role}.restarts={death.limit}",
        )
        self._ready.discard(death.name)
        self.metrics.count(f"deaths/{role}")

    async def stop_hosts(self, kind: str) -> None:
        """Tell the hosts that joined that the job is over, and give them time to hand back what they hold."""
        others = set(self.peers(self.role)) - {self.name}
        for name in others:
            with suppress(AskFailed):
                await self.ref(name).ask(StopJob(now=kind == "failed"), timeout=TELL_S)
        with suppress(TimeoutError):
            async with asyncio.timeout(STOP_LIMITS_S[kind]):
                while others & set(self.peers(self.role)):
                    await self._context.change()

    async def follow_run(self, lease_s: float) -> None:
        """On a host that joined: end it once the first host's agent was not to be found for `lease_s`, until cancelled."""
        loop = asyncio.get_running_loop()
        seen = loop.time()
        while True:
            await asyncio.sleep(LOOK_S)
            with suppress(StoreUnavailable):
                if await self.store.leases(f"actor/{NODE}"):
                    seen = loop.time()
            if loop.time() - seen > lease_s:
                self.end(
                    JobOutcome(
                        "failed", f"the run was out of reach for {lease_s:g} s (run.lease_s): this host leaves it"
                    )
                )

    async def stop_all(self, kind: str) -> None:
        """Drain every actor after an outcome of `kind`: in the order their classes ask for where it is to be saved, else all at once."""
        save = kind == "interrupted"
        self.launcher.stop_restarting()
        ranks: dict[int, list[str]] = {}
        for name in self.launcher.names():
            rank = self.job.actor_class(name.rsplit("-", 1)[0]).drain_order if save else 0
            ranks.setdefault(rank, []).append(name)
        for _, names in sorted(ranks.items()):
            async with asyncio.TaskGroup() as tasks:
                for name in names:
                    tasks.create_task(self.launcher.drain(name, STOP_LIMITS_S[kind]))

    async def _drain_elsewhere(self, names: Sequence[str]) -> Added | NotAdded:
        """Hand the request to the agents of their hosts."""
        hosts: dict[str, list[str]] = {}
        for name in names:
            record = self._context.find(name)
            hosts.setdefault(record.node if record else "", []).append(name)
        for host, there in hosts.items():
            reply = await self.ref(host).ask(DrainActors(tuple(there)), timeout=DRAIN_LIMIT_S + TELL_S)
            if isinstance(reply, NotAdded):
                return reply
        self._elsewhere -= set(names)
        return Added(tuple(names))

    def start(self, name: str) -> None:
        """Start one actor of this host and keep it running."""
        self._wanted.add(name)
        self._watch.starting(name)
        self.launcher.start(name, self.job.actors[name.rsplit("-", 1)[0]])

    def _look(self) -> None:
        for name in self.launcher.names():
            self._watch.stopped(name, now=self.launcher.is_stopped(name))

    def _too_few(self, names: Sequence[str]) -> NotAdded | None:
        """The first host judges this: it alone knows all actors of a role."""
        elsewhere = [name for name in self._elsewhere if self._context.find(name) is not None]
        left = [_role(name) for name in {*self.launcher.names(), *elsewhere} - self._draining - set(names)]
        for role in dict.fromkeys(map(_role, names)) if self.name == NODE else ():
            if left.count(role) < (least := self.job.actor_class(role).least):
                why = f"{names[0]} can't be drained: a run needs at least {least} {role}"
                return NotAdded(f"{why}. Save and end the run with: rubato stop --run {self.run.folder}")
        return None

    def _unknown(self, names: tuple[str, ...]) -> NotAdded | None:
        here = self.launcher.names()
        unknown = ", ".join(name for name in names if name not in here)
        return NotAdded(f"{unknown} does not run here. Running: {', '.join(here)}.") if unknown else None

    async def _serve_launcher(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            self.launcher = self.make_launcher(self.run.folder, tasks, self, lambda role: self.job.actors[role].threads)
            await asyncio.get_running_loop().create_future()

    def _back(self, name: str) -> None:
        died_at = self._died_at.pop(name, None)
        record = self._context.find(name)
        if died_at is not None and record is not None:
            after_s = asyncio.get_running_loop().time() - died_at
            self.screen.notice(f"{name} is back (incarnation {record.incarnation}) after {after_s:.1f} s", good=True)

    async def _bury(self, name: str) -> None:
        """Release the dead actor's lease, so that everybody knows within milliseconds; while the Store is away, at its lapse."""
        try:
            await self._context.bury(name)
        except StoreUnavailable as error:
            self.log.warning("not_buried", actor=name, error=str(error))


def _role(name: str) -> str:
    return name.rsplit("-", 1)[0]
