"""Owns trajectories from their ticket until their scored Put, or their end without one, is acknowledged."""

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar

import msgspec

from rubato.actors import plugins
from rubato.actors.config import ClusterSection, EvalSection, ModelSection, RewardSection, RolloutSection
from rubato.actors.data.tasks import Tasks
from rubato.actors.envs.chat import renderer_of
from rubato.actors.envs.hosting import TOOLS, EnvFailure, EnvHost, sentence
from rubato.actors.envs.recorder import GaveUp
from rubato.actors.envs.rollout import Rollout, RolloutContext, RolloutHook, RolloutRecord
from rubato.actors.envs.section import EnvSection, Task, resolved
from rubato.actors.messages.samples import Admit, Cancel, GiveUp, PolicyState, Put, RenewLeases, Ticket, Trajectory
from rubato.bus.errors import AskFailed, Failed
from rubato.runtime.actor import Actor, Handles, handler
from rubato.runtime.config import ActorConfig
from rubato.runtime.config import Config as Job
from rubato.runtime.importer import check_module
from rubato.runtime.kernel import Kernel
from rubato.runtime.store.store import StoreUnavailable

ADMIT_WAIT_S = 10.0
"""How long the sample buffer may hold an Admit back; the ask itself gets a few seconds more."""

ASK_S = 30.0
"""Limit of one Put or GiveUp; it is asked again until `rollout.put_timeout_s`."""

PAUSE_S = 0.5
"""Between two asks of a sample buffer that failed the first."""

GIVE_BACK_S = 4.0
"""For giving unfinished tickets back at the end of a drain; what is not acknowledged by then lapses by itself."""

DELIVERIES = 3
"""Deliveries of a trajectory or its end that the sample buffer fails, after which it is a dead letter: kept, counted and shown, not retried
for ever. A buffer that is merely away fails none."""

CANCELLED = "cancelled"
"""Why a rollout ended of which nothing could come any more."""

ONCE = "env/once"
"""Counts, by what was noticed, the managers that noticed it: the first shows it."""

DEAD_LETTERS, DEAD_LETTERS_KEPT = "dead_letters", 1000
"""The Store's stream of them, each a MessagePack map, and how many of the newest stay."""


@dataclass(eq=False)
class _Running:
    """One attempt, from its ticket until its end is acknowledged."""

    rollout: Rollout
    issuer: int
    """Incarnation of the sample buffer that gave its ticket out, for the last time."""
    task: asyncio.Task[None] | None = None
    playing: asyncio.Timeout | None = None
    """While it plays, what ends that."""
    played: bool = False
    """Whether its outcome is being delivered."""

    def cancel(self) -> None:
        """End it at once if it still plays; what it came to by then is delivered."""
        if self.playing is not None:
            self.playing.reschedule(asyncio.get_running_loop().time())
            self.playing = None


class EnvManager(plugins.Hooked[RolloutHook], Actor):
    """Runs up to `env.concurrency` rollouts at once. Holds nothing that must survive it: its tickets lapse and are issued again."""

    role: ClassVar[str] = "env_manager"
    drain_order: ClassVar[int] = 10
    least: ClassVar[int] = 1
    needs: ClassVar[tuple[str, ...]] = ("sample_buffer", "llm_proxy")
    hook_messages: ClassVar[Mapping[str, str]] = {tag: path for tag, (_, path) in plugins.ROLLOUT_MESSAGES.items()}

    class Config(ActorConfig):
        env: EnvSection = EnvSection()
        rollout: RolloutSection = RolloutSection()
        model: ModelSection = ModelSection()
        reward: RewardSection = RewardSection()
        eval: EvalSection = EvalSection()
        tasks: Tasks = {}
        cluster: ClusterSection = ClusterSection()

    config: Config

    @classmethod
    def check(cls, job: Job) -> None:
        plugins.load(plugins.ROLLOUT_CHECK)(job)

    @classmethod
    def plugin_classes(cls, job: Job) -> tuple[type[Handles], ...]:
        """Hooks that answer messages of other actors of the job."""
        return tuple(plugins.load(path) for section, path in plugins.ROLLOUT_MESSAGES.values() if job.has(section))

    @classmethod
    def check_host(cls, config: Config) -> None:
        """The environments' modules, whose content shows when a manager tries them, and data sets."""
        plugins.check_rollout_host(config)
        if config.tasks:
            plugins.load(plugins.TASK_CHECKS)(config.tasks)
        else:
            check_module(config.env.target, key="env.class")

    @classmethod
    def preflight(cls, config: Config, folder: Path) -> None:
        plugins.load(plugins.RENDERING_CHECK)(config, folder)

    def __init__(self, config: Config, kernel: Kernel) -> None:
        super().__init__(config, kernel)
        self._limits = config.rollout
        self._log = str(self.run.folder / "logs" / f"{self.name}.jsonl")
        self._tasks = resolved(config.tasks, config.env, config.rollout, config.reward)
        self._hosts = self._hosts_of()
        self._records = self._new_records()
        self._policy = PolicyState(version=0, alpha=-1)
        self._running: dict[tuple[str, int], _Running] = {}
        self._changed = asyncio.Event()
        self._admitting: asyncio.Task[None] | None = None
        self._rollouts: dict[str, RolloutContext] = {}
        self._ended = self._aside = False
        self._started = False
        self.begin_hooks(plugins.rollout_hooks(config))
        self.plugins = self.hooks

    async def on_start(self) -> None:
        """Try the environment, then begin to admit. A broken one ends the job with one sentence."""
        self._buffer = self.ref("sample_buffer")
        if problem := await self._prepare():
            self._end(problem)
            return
        self.metrics.gauge("rollout/room", self.config.env.concurrency)
        pooled = [host.pool.size for host in self._hosts.values() if host.pooled]
        self._sized(max(pooled, default=0))
        self._admitting = self.spawn(self._admit(), name=f"{self.name}.admit")
        self.spawn(self._hold(), name=f"{self.name}.hold")
        for hook in self.hooks:
            self._run_hook(hook)
        self._started = True

    async def on_peers(self, joined: tuple[str, ...], left: tuple[str, ...]) -> None:
        """For the hooks."""
        for hook in self.hooks:
            hook.peers_changed()

    def make(self, path: str) -> RolloutHook:
        return plugins.load(path)(self, self._playing)

    def came(self, hook: RolloutHook) -> None:
        if self._started:
            self._run_hook(hook)

    def _run_hook(self, hook: RolloutHook) -> None:
        self.spawn(hook.run(), name=f"{self.name}.{type(hook).__name__}")

    async def on_drain(self) -> None:
        """Admit no more, and give every ticket back at once, for another manager: a group waits for all of its members."""
        if self._admitting is not None:
            self._admitting.cancel()
        if not self._ended:  # else the job is over: what still runs is of no use
            await self._give_back()

    async def on_stop(self) -> None:
        """Close environments and kill their workers: the first host's last, since others may share them."""
        hosts = [*self._hosts.values()]
        async with asyncio.TaskGroup() as tasks:
            for host in hosts[1:]:
                tasks.create_task(host.close())
        for host in hosts[:1]:
            await host.close()

    @handler
    async def policy_changed(self, message: PolicyState) -> None:
        """A hint of the sample buffer: the newest version, or α, is another one."""
        self._policy = message

    @handler
    async def cancelled(self, message: Cancel) -> None:
        """The sample buffer says that nothing can come of some rollouts; those that are unknown or over are ignored."""
        for key in message.rollouts if message.incarnation == self.incarnation else ():
            running = self._running.get(key)
            if running is not None and running.issuer <= message.issuer:
                running.cancel()

    def _playing(self) -> list[Rollout]:
        return [running.rollout for running in self._running.values() if running.playing]

    def _hosts_of(self) -> dict[str, EnvHost]:
        """They share their workers."""
        hosts: dict[str, EnvHost] = {}
        for name, task in self._tasks.items():
            hosts[name] = EnvHost(
                task.env,
                on_output=self._output,
                on_notice=self._blocked,
                on_size=self._sized,
                shares=next(iter(hosts.values()), None),
                task=name,
            )
        return hosts

    def _blocked(self, text: str) -> None:
        self.log.warning("user_code_blocks", text=text)
        showing = self._show_once(f"blocked/{text.partition(' blocked ')[0]}", text)
        self.spawn(showing, name=f"{self.name}.notice")

    async def _show_once(self, key: str, text: str) -> None:
        """In a run, however many managers say the same."""
        with suppress(StoreUnavailable):
            if await self.store.increment(f"{ONCE}/{key}") == 1:
                self.notice(text)

    def _sized(self, workers: int) -> None:
        self.metrics.gauge("rollout/env_workers", workers)

    def _output(self, line: str) -> None:
        self.log.info("user_output", text=line)

    async def _prepare(self) -> str:
        """Read the tokenizer and try the environments; returns the sentence that ends the job, if any."""
        for name, task in self._tasks.items():
            if problem := await self._prepare_task(name, task, self._hosts[name]):
                return problem
        await self._look_at_tasks()
        return ""

    async def _prepare_task(self, name: str, task: Task, host: EnvHost) -> str:
        folder, limits = self.run.folder / self.config.model.path, task.rollout
        try:
            await host.start()
            renderer = await self.offload(partial(renderer_of, limits, folder, tools=host.declared.get(TOOLS, ())))
            failures = await host.try_out(self.run.seed)
        except ValueError as error:
            return str(error)
        except EnvFailure as failure:
            return sentence(task.env, failure, seed=self.run.seed, log=self._log)
        if failures:
            text = sentence(task.env, failures[0], seed=self.run.seed, log=self._log)
            self.notice(f"{text}. The job goes on: another seed works (tried: {len(failures) + 1})")
        self._rollouts[name] = RolloutContext(
            env=task.env,
            rollout=limits,
            host=host,
            renderer=renderer,
            proxy=self.ref("llm_proxy"),
            reward=self.ref("reward_service") if task.reward.targets else None,
            policy=lambda: self._policy,
            metrics=self.metrics,
            waits=self.waits,
            eval=self.config.eval,
            score_names=task.reward.names,
            hooks=self.hooks,
        )
        return ""

    async def _look_at_tasks(self) -> None:
        """Show what is odd about them: held-out tasks may be no others than those of training, and a template may leave reasoning out."""
        if self.config.eval.every or self.config.eval.final_num_tasks:
            for name in (name for name, host in self._hosts.items() if not host.has_split):
                await self._show_once(
                    f"no_split/{name}", plugins.load(plugins.SPLIT_ADVICE)(self._tasks[name], self.config.tasks.get(name))
                )
        if any(each.renderer.drops_reasoning for each in self._rollouts.values()):
            await self._show_once(
                "reasoning_dropped",
                "the model's chat template leaves out what the model reasoned in earlier turns, while rollouts keep every token that was "
                "sampled. A server that goes by that template shows the model less than it was trained on (docs/tasks.md)",
            )

    async def _admit(self) -> None:
        """Keep as many rollouts running as there are tickets and room for."""
        while not self._ended:
            room = self._room()
            if room == 0:
                self._changed.clear()
                await self._changed.wait()
                continue
            request = Admit(room, self.name, self.incarnation, ADMIT_WAIT_S)
            try:
                detail = f"room for {room} rollouts"
                with self.waits.on("tickets", detail=detail, holder="sample_buffer", idle=True):
                    reply = await self._buffer.ask(request, timeout=ADMIT_WAIT_S + 5.0)
            except AskFailed as error:
                self.log.warning("not_admitted", error=str(error))
                await asyncio.sleep(PAUSE_S)
                continue
            self._policy = reply.policy
            if self._aside and not reply.aside:  # it comes back, and is judged by what follows
                self._records = self._new_records()
            self._aside = reply.aside
            for ticket in reply.tickets:
                self._begin(ticket, reply.issuer)
            if reply.closed:
                self.log.info("closed", running=len(self._running))
                return

    def _room(self) -> int:
        return self.config.env.concurrency - len(self._running)

    def _begin(self, ticket: Ticket, issuer: int) -> None:
        key = (ticket.trajectory_id, ticket.attempt)
        if ticket.task not in self._tasks:
            named = f"tasks.{ticket.task}" if ticket.task else "no task"
            self._end(f"the run has unfinished groups of {named}, which its config had before: put that back, or start another run")
        elif key in self._running:  # a Store that forgot its last seconds gives it out again
            self._running[key].issuer = issuer
        else:
            self._records[ticket.task].begun(ticket)
            running = self._running[key] = _Running(self._rollouts[ticket.task].rollout_of(ticket), issuer)
            running.task = self.spawn(self._run(running), name=f"{self.name}.{ticket.trajectory_id}")
            self.metrics.gauge("rollout/in_flight", len(self._running))

    async def _run(self, running: _Running) -> None:
        rollout, ticket = running.rollout, running.rollout.recorder.ticket
        try:
            trajectory = await self._play(running)
        except GaveUp as end:
            await (self._cancelled if end.reason == CANCELLED else self._failed)(rollout, end)
        except Exception as error:
            self.log.exception("rollout_crashed", trajectory=ticket.trajectory_id, attempt=ticket.attempt)
            await self._failed(rollout, GaveUp("crashed", f"{error!r:.500}", retry=True))
        else:
            await self._finished(rollout, trajectory)
        finally:
            self._running.pop((ticket.trajectory_id, ticket.attempt), None)
            self._changed.set()
            self.metrics.gauge("rollout/in_flight", len(self._running))

    async def _play(self, running: _Running) -> Trajectory:
        """Raises GaveUp, also where it was cancelled."""
        rollout, whole = running.rollout, False
        scope = running.playing = asyncio.timeout(None)
        try:
            async with scope:
                with self.trace.span("rollout", "env", trajectory=rollout.recorder.ticket.trajectory_id):
                    trajectory = await rollout.play()
            whole = True
            return trajectory
        except TimeoutError:
            if scope.expired():
                raise GaveUp(CANCELLED, retry=True) from None
            raise
        finally:
            running.playing, running.played = None, True
            for hook in self.hooks:
                hook.ended(rollout, whole=whole)

    async def _finished(self, rollout: Rollout, trajectory: Trajectory) -> None:
        ticket = rollout.recorder.ticket
        self._records[ticket.task].good(ticket)
        self.metrics.count("rollout/finished")
        self.metrics.observe("rollout/turns", trajectory.turns)
        self.metrics.observe("rollout/wall_s", trajectory.wall_s)
        if await self._deliver(Put(trajectory)) is None:
            await self._deliver(rollout.recorder.given_up("dead_letter", retry=True))

    async def _cancelled(self, rollout: Rollout, end: GaveUp) -> None:
        """Report what it had sampled; where it is wanted after all, it is issued again."""
        self.metrics.count("rollout/cancelled")
        ticket = rollout.recorder.ticket
        self._records[ticket.task].bad(ticket, end)
        await self._deliver(rollout.recorder.given_up(end.reason, retry=end.retry))

    async def _failed(self, rollout: Rollout, end: GaveUp) -> None:
        ticket, end.detail = rollout.recorder.ticket, self.run.hidden(end.detail)
        self.metrics.count("rollout/error")
        self.metrics.count(f"rollout/error/{end.reason}")
        self.log.warning(
            "rollout_failed",
            trajectory=ticket.trajectory_id,
            attempt=ticket.attempt,
            reason=end.reason,
            detail=end.detail,
            where=end.failure.where if end.failure else "",
            retry=end.retry,
        )
        notices, verdict = self._records[ticket.task].bad(ticket, end)
        for notice in notices:
            self.notice(notice)
        await self._deliver(rollout.recorder.failed(end))
        if verdict and not self._aside:  # the answer says whether it is this manager's own trouble
            self._end(verdict)

    def _new_records(self) -> dict[str, RolloutRecord]:
        return {name: RolloutRecord(task.env, self._log) for name, task in self._tasks.items()}

    async def _deliver(self, request: Put | GiveUp) -> str | None:
        """Ask until it is acknowledged, by its fate: only then does this actor let go of the trajectory. None where it became a dead letter."""
        loop = asyncio.get_running_loop()
        until = loop.time() + self._limits.put_timeout_s
        ticket = request.trajectory.ticket if isinstance(request, Put) else request.ticket
        failed, stage = 0, "put" if isinstance(request, Put) else "give_up"
        limit = f"rollout.put_timeout_s={self._limits.put_timeout_s:g}"
        with self.waits.on(ticket.trajectory_id, stage=stage, holder="sample_buffer", limit=limit):
            while True:
                try:
                    stored = await self._buffer.ask(request, timeout=ASK_S)
                except AskFailed as error:
                    failed += isinstance(error, Failed)
                    if failed >= DELIVERIES:
                        await self._keep_dead_letter(ticket, type(request).__name__, str(error))
                        return None
                    if loop.time() >= until:
                        self.log.error("not_delivered", trajectory=ticket.trajectory_id, error=str(error))
                        return "not_delivered"
                    await asyncio.sleep(PAUSE_S * 4**failed)
                else:
                    self._policy = stored.policy
                    self._aside |= stored.aside
                    return stored.fate

    async def _keep_dead_letter(self, ticket: Ticket, request: str, error: str) -> None:
        letter = {"trajectory_id": ticket.trajectory_id, "attempt": ticket.attempt, "holder": self.name}
        letter |= {"request": request, "error": error[:2000]}
        self.metrics.count("dead_letters")
        self.log.error("dead_letter", **letter)
        self.notice(f"{ticket.trajectory_id}: {DELIVERIES} deliveries failed; the attempt counts as failed ({error[:200]})")
        try:
            await self.store.append(DEAD_LETTERS, msgspec.msgpack.encode(letter), limit=DEAD_LETTERS_KEPT)
        except StoreUnavailable as away:
            self.log.warning("dead_letter_not_kept", error=str(away))

    async def _hold(self) -> None:
        """Renew the tickets of everything that runs, also while nothing else is heard of it."""
        while True:
            await asyncio.sleep(self._limits.hold_s)
            if not self._running:
                continue
            held = {key: running.rollout.recorder.version_last for key, running in self._running.items()}
            try:
                self._policy = await self._buffer.ask(RenewLeases(tuple(held), self.name, self.incarnation), timeout=self._limits.hold_s)
            except AskFailed as error:
                self.log.warning("not_held", num=len(self._running), error=str(error))
                continue
            # Weights that are known no more come from no trainer until their step has other groups: those may be what waits for them.
            for key in [key for key, version in held.items() if 0 <= self._policy.newest < version and key in self._running]:
                self._running[key].cancel()

    async def _give_back(self) -> None:
        """Hand every unfinished ticket back, for another manager to start anew, and deliver what is finished."""
        unfinished = [running for running in self._running.values() if not running.played]
        for running in unfinished:
            if running.task is not None:
                running.task.cancel()
        self.log.info("tickets_given_back", num=len(unfinished))
        try:
            async with asyncio.timeout(GIVE_BACK_S), asyncio.TaskGroup() as tasks:
                for running in unfinished:
                    tasks.create_task(self._deliver(running.rollout.recorder.given_up("drained", retry=True)))
                while self._running:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            self.log.warning("not_given_back", after_s=GIVE_BACK_S)

    def _end(self, why: str) -> None:
        if not self._ended:
            self._ended = True
            self.finish(why, failed=True)
