"""SampleBuffer: the only source of work, with the last word on age; a slot is freed when its group was trained or dropped.

Every handler changes the groups in memory, waits for the journal's write, and only then answers.
"""

import asyncio
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

import msgspec
from pydantic import Field

from rubato.actors.checkpoints.checkpoint import newest_receipts
from rubato.actors.checkpoints.model_folder import vocab_size_of
from rubato.actors.config import BatchSections, ModelSection
from rubato.actors.data.prompts import Mixture, mixture_of
from rubato.actors.data.tasks import Tasks
from rubato.actors.messages.samples import (
    BAD_LOGPROBS,
    Admit,
    Advance,
    Batch,
    Claim,
    Close,
    Commit,
    DrawTerm,
    EvalResult,
    Evaluate,
    GiveUp,
    NotReady,
    PolicyState,
    Put,
    RenewLeases,
    StepRaised,
    Stored,
    Term,
    Ticket,
    Tickets,
    Trajectory,
)
from rubato.actors.plugins import batch_policies
from rubato.actors.samples.group import MIN_SCORED, Group, Receipt, Training, limits_of
from rubato.actors.samples.groups import Groups
from rubato.actors.samples.journal import Journal, Payloads, Wake
from rubato.actors.samples.leases import (
    ENV_MANAGER,
    ENV_REASONS,
    NO_LEASE,
    Cancels,
    HolderRecords,
    Holders,
    gauges,
    why_barren,
    why_no_batch,
    why_no_tickets,
    why_unfinished,
)
from rubato.actors.samples.policy import MakePolicy, PolicyJob, PolicyPlugin
from rubato.actors.samples.run_files import HeldOutFiles, KeptTrajectories, SampleLedger, fitting
from rubato.actors.samples.sample import FUTURE_VERSION, INLINE_BYTES, Outcome, OutOfOrder, flaw, outcome_of, spent_of
from rubato.bus.errors import AskFailed
from rubato.bus.message import Ack
from rubato.planning.staleness import HandOver, min_version
from rubato.runtime.actor import Actor, handler
from rubato.runtime.config import Config as Job
from rubato.runtime.errors import ConfigError, check_all
from rubato.runtime.importer import check_module, load_class
from rubato.runtime.observe.figures import STORE, Wait
from rubato.runtime.registry import ActorRecord
from rubato.runtime.store.store import Fence

HINT_S = 1.0
"""A manager that grants no credit for this long misses the hint; every reply carries the policy's state too."""

UNCOUNTED = ("drained", "env_lost", "cancelled")
"""Attempts that end for these reasons do not count against `max_attempts`: the rollout that crashed its worker is charged, the others on
that worker are not."""

BARREN_TOLD = 8
"""After so many groups in a row that came to nothing, each with too few scored members, the user sees a notice, once; of others after a
batch's worth of them."""

TERM = "samples/epoch"
"""Counter of trainers' terms: it leaps where the Store forgot, so none is drawn twice."""


DIGITS, MOST_FLAWS = re.compile(r"[-+.\d]+"), 5
"""Kinds of refused trajectories that are shown to the user; the log has all of them."""


class SampleBuffer(Actor):
    """Issues tickets, takes trajectories in, hands batches out. At its bounds callers wait: admission for slots, claims for groups."""

    role = "sample_buffer"
    least = most = 1
    _rebuilt = False

    class Config(BatchSections):
        model: ModelSection = Field(default_factory=ModelSection)
        tasks: Tasks = {}

    config: Config

    @classmethod
    def check(cls, job: Job) -> None:
        """Ask the plug-ins that sections name."""
        for target in _built_in(job.actor_config(cls.role)):
            load_class(target, PolicyPlugin).check(job)

    @classmethod
    def check_host(cls, config: Config) -> None:
        """The modules of a user's plug-ins; what is in them shows as this actor starts."""
        check_all(partial(check_module, target, key="samples.policy") for target in config.samples.policy)

    @classmethod
    def preload(cls, config: Config) -> tuple[str, ...]:
        """The plug-ins that sections name."""
        return tuple(target.partition(":")[0] for target in _built_in(config))

    async def on_start(self) -> None:
        """Rebuild from the Store and the newest checkpoint, then serve."""
        self._closed = self._draining = self._barren_told = False
        self._flaws: set[str] = set()
        self._slots, self._outcomes, self._claiming, config = Wake(), Wake(), asyncio.Lock(), self.config
        mixture = await self.offload(mixture_of, config.tasks, self.run.seed)
        limits = limits_of(config.train, config.samples, self.run, mixture)
        self._most_alpha = config.staleness.bound
        self._groups = groups = Groups(limits, self._most_alpha, await self._policies())
        self._journal = journal = Journal(
            self.store, Fence(self.role, self.incarnation), groups, window_s=self.run.window_s,
            most_bytes=config.samples.unsettled_mb << 20, metrics=self.metrics, log=self.log, store_back=self._slots.set,
        )  # fmt: skip
        self._holders = Holders(groups, self._incarnation_of, self._drains, self._slots.set, self.log)
        self._records = HolderRecords(groups, lambda: self.peers(ENV_MANAGER), self.notice)
        rotate_bytes, on_disk = int(config.samples.rotate_mb * 2**20), partial(self.on_disk, self.run.folder)
        self._ledger = SampleLedger(self.run.folder, journal, self.incarnation, on_disk, self.log, self.run.seed, rotate_bytes)
        self._kept = KeptTrajectories(self.run.folder, config.samples.keep, limits.group_size, on_disk, self.log)
        self._held_out = HeldOutFiles(self.run.folder, on_disk, self.log)
        self._payloads = Payloads(self.run.folder / "samples", journal, on_disk, self._tell_gone, self.log)
        self._vocab_size = await self.offload(vocab_size_of, self.run.folder / self.config.model.path)
        restored = await journal.take_over()
        self._check_data(mixture, restored[0])
        groups.restore(*restored, self._now())
        await self._cover()
        self.spawn(journal.run(), name="journal")
        await journal.sync()
        await self._ledger.open()
        await self._payloads.sweep((*groups.live.values(), *groups.trained.values()))
        await self._holders.check_all()
        self._rebuilt = True
        self.spawn(self._holders.watch_leases(), name="leases")
        self.spawn(Cancels(groups, self._slots, self.incarnation, self.ref).follow(), name="cancels")
        self.spawn(self._ledger.follow(), name="ledger")
        self.spawn(self._kept.follow(), name="trajectories")
        gauges(groups, self.metrics)
        self.log.info("rebuilt", version=groups.training.version, groups=len(groups.live), lines=self._ledger.index)

    async def _policies(self) -> list[MakePolicy]:
        """Makers of the plug-ins. One that can't be loaded ends the job."""
        job = PolicyJob(self.config, self._now, self.notice, self.log)
        made: list[MakePolicy] = []
        try:
            for target, key in batch_policies(self.config):
                made.append(partial((await self.offload(partial(load_class, target, PolicyPlugin, key=key))).of, job=job))
        except ConfigError as error:
            self._draining = True
            self.finish(str(error), failed=True)
        return made

    def _check_data(self, mixture: Mixture, training: Training) -> None:
        """End the job where data sets are not what was trained on so far; held-out rows that are others get a notice."""
        try:
            for sentence in mixture.check(training.tasks):
                self.notice(sentence)
        except ConfigError as error:
            self.finish(str(error), failed=True)

    async def on_drain(self) -> None:
        """Admit nothing more. Everything acknowledged is durable already; the ledger is brought up to date."""
        self._draining = True
        await self._journal.sync()
        await self._kept.catch_up()
        with suppress(OSError):
            await self._ledger.check()

    async def on_peers(self, joined: tuple[str, ...], left: tuple[str, ...]) -> None:
        """Rollouts of an actor that went away are issued again at once; those who leave before all is rebuilt are seen then."""
        for name in left if self._rebuilt else ():
            await self._holders.left(name, is_back=name in self.peers(name.rpartition("-")[0]))
        for name in joined if self._rebuilt else ():
            self._holders.joined(name)

    # -- environment managers -----------------------------------------------------------------------------------

    @handler(concurrency=1024)
    async def admit(self, request: Admit) -> Tickets:
        self._holders.asked(request.holder, request.incarnation)
        tickets: list[Ticket] = []
        with suppress(TimeoutError), self._groups.waiting(request.num):
            async with asyncio.timeout(request.wait_s):
                while not (tickets := self._issue(request)) and not self._closed:
                    with self._no_tickets(request.holder):
                        await self._slots.event.wait()
        sent = await self._make_durable(tickets)
        aside = self._records.is_aside(request.holder)
        return Tickets(tuple(sent), self._groups.policy, self._closed, self.incarnation, aside)

    @handler(concurrency=64)
    async def renew_leases(self, request: RenewLeases) -> PolicyState:
        self._holders.renew(request.holder, request.incarnation, request.held)
        await self._journal.sync()
        return self._groups.policy

    @handler(concurrency=1024)
    async def put(self, request: Put) -> Stored:
        with self.waits.on(request.trajectory.ticket.trajectory_id, stage="intake", holder=STORE):
            fate = await self._put(request.trajectory)
            await self._journal.sync()
        return Stored(fate=fate, policy=self._groups.policy)

    @handler(concurrency=1024)
    async def give_up(self, request: GiveUp) -> Stored:
        with self.waits.on(request.ticket.trajectory_id, stage="intake", holder=STORE):
            holder = self._records.holder_of(request.ticket)
            fate = self._give_up(request, self._spent(request))
            if fate == "failed" and request.played is not None:
                self._kept.offer(request.played)
            await self._journal.sync()
        return Stored(fate=fate, policy=self._groups.policy, aside=self._records.is_aside(holder))

    # -- the trainer --------------------------------------------------------------------------------------------

    @handler(concurrency=16)
    async def draw_term(self, request: DrawTerm) -> Term:
        """A trainer takes over from its checkpoint of `request.step`, which is committed here if it was not."""
        async with self._claiming:
            drawn = await self._journal.retried(lambda: self.store.increment(TERM, at_least=request.at_least))
            term = max(drawn, self._groups.training.term + 1)
            await self._cover(request.step)
            self._groups.take_over(term, request.step)
            if dropped := self._groups.drop_bound(self._most_alpha):
                what = f"step {dropped[0]}" if len(dropped) == 1 else f"steps {dropped[0]} to {dropped[-1]}"
                self.notice(f"{what} had samples that staleness.alpha={self._most_alpha} makes too old: they are sampled anew")
            self._wake()
            await self._journal.sync()
        begun = Term(term=term, committed=self._groups.training.committed, bound=tuple(sorted(self._groups.steps)))
        self.log.info("term_drawn", term=term, committed=begun.committed, bound=begun.bound)
        return begun

    @handler(concurrency=16)
    async def claim(self, request: Claim) -> Batch | NotReady:
        until = self._now() + request.wait_s
        while True:
            async with self._claiming:
                found = await self._claim(request)
            if isinstance(found, Batch):
                return found
            changed = self._outcomes.event
            limit = f"samples.ticket_ttl_s={self.config.samples.ticket_ttl_s:g}"
            wait = self.waits.on(f"batch {request.step}", stage="batch", limit=limit, idle=True)
            with wait.described_by(lambda plan=found: self._held_up(why_no_batch(self._groups, plan))), suppress(TimeoutError):
                async with asyncio.timeout_at(until):
                    await changed.wait()
            if self._now() >= until:
                await self._journal.sync()
                return NotReady(sum(1 for _ in self._groups.ready()), request.groups, found.why, self._groups.base)

    @handler(concurrency=16)
    async def advance(self, request: Advance) -> PolicyState:
        groups, before = self._groups, self._groups.training.version
        groups.check_term(request.term)
        groups.advance(request.step)
        groups.drop_old(min_version(groups.base + 1, groups.alpha))
        self._wake()
        gauges(groups, self.metrics)
        await self._journal.sync()
        if groups.training.version > before:
            self.spawn(self._hint(), name="hint")
        return groups.policy

    @handler(concurrency=16)
    async def commit(self, request: Commit) -> Ack:
        self._groups.check_term(request.term)
        await self._cover(request.step)
        self._groups.check_term(request.term)
        self._groups.commit(request.step, request.term)
        self._groups.advance(request.step)
        self._wake()
        gauges(self._groups, self.metrics)
        await self._journal.sync()
        return Ack()

    @handler(concurrency=16)
    async def step_raised(self, request: StepRaised) -> Ack:
        self._groups.check_term(request.term)
        poisoned = self._groups.raised(request.step, request.term)
        self.log.error("step_raised", step=request.step, error=request.error, poisoned=len(poisoned))
        if poisoned:
            self.spawn(self._tell_poisoned(request, len(poisoned)), name="poisoned")
        self._wake()
        await self._journal.sync()
        return Ack()

    @handler(concurrency=16)
    async def evaluate(self, request: Evaluate) -> EvalResult | NotReady:
        group = self._groups.round(f"eval-{request.key}", request.num, request.version, request.samples)
        self._slots.set()
        wait = self.waits.on(f"evaluation {request.key}", stage="evaluation", idle=True)
        with wait.described_by(lambda: self._held_up(why_unfinished(group))), suppress(TimeoutError):
            async with asyncio.timeout(request.wait_s):
                while not group.complete:
                    await self._outcomes.event.wait()
        await self._journal.sync()
        if not group.complete:
            why = f"{group.num_settled} of {len(group.members)} held-out rollouts have an outcome"
            return NotReady(ready=group.num_settled, wanted=len(group.members), why=why)
        await self._held_out.keep(group)
        return group.result()

    @handler(concurrency=16)
    async def close(self, request: Close) -> Ack:
        self._closed = True
        self._groups.end_unused()
        self._wake()
        await self._journal.sync()
        self.log.info("closed", version=self._groups.training.version)
        return Ack()

    # -- tickets and rollouts -----------------------------------------------------------------------------------

    def _issue(self, request: Admit) -> list[Ticket]:
        tickets: list[Ticket] = []
        is_open = self._journal.is_healthy and not (self._closed or self._draining)
        if not is_open or not self._holders.may_have(request.holder, request.incarnation):
            return tickets
        try:
            num = self._records.allowed(request.holder, request.incarnation, request.num)
            tickets = self._groups.issue(num, request.holder, request.incarnation, self._now())
            self._records.issued(request.holder, tickets)
        except ConfigError as error:  # a sampler of the user's
            self.finish(str(error), failed=True)
        if tickets:
            self._holders.granted()
        return tickets

    def _no_tickets(self, holder: str) -> Wait:
        if self._records.is_aside(holder):
            wait = self.waits.on(holder, stage="aside", idle=True)  # blocked.py knows it
            return wait.described_by(lambda: (self._records.why(holder), ""))
        wait = self.waits.on("tickets", stage="slots", limit=f"staleness.alpha={self._groups.alpha}", idle=True)
        return wait.described_by(lambda: self._held_up(why_no_tickets(self._groups)))

    async def _make_durable(self, tickets: list[Ticket]) -> list[Ticket]:
        """The tickets to send, durable. A manager that gave up asking never saw them; those taken back meanwhile are left out."""
        try:
            await self._journal.sync()
        except asyncio.CancelledError:
            self._groups.unsend(tickets)
            self._slots.set()
            raise
        return self._groups.on_their_way(tickets, self._now())

    async def _put(self, trajectory: Trajectory) -> str:
        """Take a scored trajectory in; returns its fate so far ("" while it may train)."""
        ticket, spent = trajectory.ticket, self._spent(trajectory)
        name = ticket.trajectory_id
        if (fate := self._settled(ticket, spent)) is not None:
            return fate
        if found := flaw(trajectory, newest=self._groups.base, vocab_size=self._vocab_size):
            self.log.error("trajectory_refused", trajectory=name, attempt=ticket.attempt, flaw=found)
            self._tell_refused(name, found)
            if found.startswith(FUTURE_VERSION):
                return self._change(ticket, spent, lambda: self._groups.take_back(name, found, counted=True, spent=spent) or "superseded")
            return self._change(ticket, spent, lambda: self._groups.fail(name, "failed", found, spent))
        self._kept.offer(trajectory)
        self._records.good(ticket)
        outcome = outcome_of(trajectory)
        if ticket.purpose == "eval":
            held_out = msgspec.structs.replace(outcome, text=spent.text)
            return self._change(ticket, spent, lambda: self._groups.score(name, held_out))
        payload = msgspec.msgpack.encode(trajectory)
        if len(payload) <= INLINE_BYTES:
            await self._journal.room(len(payload))
            return self._change(ticket, spent, lambda: self._groups.score(name, outcome, payload))
        return await self._put_file(ticket, outcome, payload)

    async def _put_file(self, ticket: Ticket, outcome: Outcome, payload: bytes) -> str:
        name = ticket.trajectory_id
        digest = await self._payloads.file(name, ticket.attempt, payload)
        fate = self._change(ticket, outcome, lambda: self._groups.score(name, outcome, digest=digest))
        found = self._groups.find(name)
        if found is None or found[1].digest != digest:
            await self._payloads.unlink(name, ticket.attempt)  # it came too late
        return fate

    def _spent(self, came: Trajectory | GiveUp) -> Outcome:
        """Cost of a rollout that may be no sample; of a held-out one also its text."""
        return fitting(spent_of(came), self._groups.rounds.get(came.ticket.group_id))

    def _give_up(self, request: GiveUp, spent: Outcome) -> str:
        """A rollout ended without a score: another attempt, or its end."""
        name, reason, holder = request.ticket.trajectory_id, request.reason, self._records.holder_of(request.ticket)
        self._records.bad(request.ticket, reason)
        if request.retry or (reason in ENV_REASONS and self._records.is_aside(holder)):
            failed = reason not in UNCOUNTED
            return self._change(
                request.ticket, spent, lambda: self._groups.take_back(name, reason, counted=failed, failed=failed, spent=spent)
            )
        fate = "stale" if reason == "stale" else "failed"
        if reason == BAD_LOGPROBS:
            reason = f"{reason}: {request.detail}"
        return self._change(request.ticket, spent, lambda: self._groups.fail(name, fate, reason, spent))

    def _change(self, ticket: Ticket, spent: Outcome, change: Callable[[], str]) -> str:
        """Let `change` happen to a rollout of which nothing came yet; returns its fate."""
        if (settled := self._settled(ticket, spent)) is not None:
            return settled
        fate = change()
        self._wake()
        self._tell_barren()
        if fate == "" and self._groups.settled_fate(ticket) == "":
            self.metrics.count("samples/put")
        return fate

    def _settled(self, ticket: Ticket, spent: Outcome) -> str | None:
        """The fate of a rollout of which nothing more may come, where it has one; what was `spent` on it is noted."""
        fate = self._groups.settled_fate(ticket)
        if fate == "superseded":
            self.metrics.count("tickets/refused")
            self.metrics.count("tickets/refused_tokens", spent.tokens)
        elif fate is not None:
            self._groups.late(ticket, spent)
        return fate

    # -- batches ------------------------------------------------------------------------------------------------

    async def _claim(self, request: Claim) -> Batch | HandOver:
        """The batch of a step, bound now or before, or why there is none. A trainer that claims a step has trained those before."""
        groups = self._groups
        groups.check_term(request.term)
        groups.advance(request.step - 1)
        groups.asked(request.step, request.ess, request.kl)
        self._freed()
        samples: list[list[bytes]] | None = None
        while request.step not in groups.steps:
            plan = groups.plan(request.step, request.groups)
            self._freed()
            if not plan.take:
                return plan
            samples = await self._bind(request, groups.chosen(plan))
        bound = groups.steps[request.step]
        if samples is None:
            found = await self._payloads.of(bound)
            samples = [kept for group in found if (kept := [s for s in group if s is not None])]
            if not samples:
                raise OutOfOrder(f"the samples of step {request.step} are gone: only the checkpoint that covers it knows them")
            self._lose_gone(bound, found)
        await self._journal.sync()
        gauges(groups, self.metrics)
        ends, training = tuple(end for group in bound for end in group.ends(request.term)), groups.training
        receipt = msgspec.msgpack.encode(Receipt(request.step, training.cursor, ends, groups.record().policies))
        return Batch.of(request.step, samples, receipt, groups.figures(request.step))

    async def _bind(self, request: Claim, chosen: list[Group]) -> list[list[bytes]] | None:
        """The payloads of the chosen groups, which are bound now; None where some are gone, or something came between."""
        found = await self._payloads.of(chosen)
        self._groups.check_term(request.term)
        if any(group.state != "ready" for group in chosen):
            return None
        if self._lose_gone(chosen, found):
            return None
        self._groups.bind(request.step, chosen)
        self._freed()
        self.metrics.count("groups/shrunk", sum(group.num_scored < self.config.train.group_size for group in chosen))
        return [[sample for sample in samples if sample is not None] for samples in found]

    def _lose_gone(self, groups: list[Group], found: list[list[bytes | None]]) -> bool:
        """End the samples of which nothing was found; whether there are any."""
        gone = [(group, samples) for group, samples in zip(groups, found, strict=True) if None in samples]
        for group, samples in gone:
            self._groups.lose(group, [at for at, s in zip(group.scored, samples, strict=True) if s is None])
        return bool(gone)

    # -- around it ----------------------------------------------------------------------------------------------

    async def _cover(self, step: int | None = None) -> None:
        """Learn from the newest checkpoint of steps up to `step` (None: whatever it covers) that the Store forgot."""
        if step is None or not self._groups.covers(step):
            receipts = await self.offload(newest_receipts, self.run.folder / "checkpoints")
            self._groups.cover(msgspec.msgpack.decode(receipt, type=Receipt) for receipt in receipts)

    def _wake(self) -> None:
        """Wake what waits for a change, and have the change written."""
        self._freed()
        self._outcomes.set()

    def _freed(self) -> None:
        """Wake admission and the journal alone: each claim calls this, and two that wait would wake each other for ever."""
        self._slots.set()
        self._journal.poke()

    async def _hint(self) -> None:
        for name in self.peers(ENV_MANAGER):
            with suppress(AskFailed, TimeoutError):
                async with asyncio.timeout(HINT_S):
                    await self.ref(name).tell(self._groups.policy)

    async def _tell_poisoned(self, request: StepRaised, num: int) -> None:
        """The user hears of it once it is durable, whether or not the trainer still waits for its answer."""
        await self._journal.sync()
        what = f"training on step {request.step} raised twice ({request.error})"
        self.notice(f"{what}: its {num} groups end as poisoned, and the step gets others")

    def _tell_barren(self) -> None:
        """Where groups come to nothing one after another the user hears of it, and the run ends: it would play for ever."""
        barren, most = self._groups.training.barren, self._groups.limits.max_barren_groups
        if barren.in_a_row >= most:
            self.finish(why_barren(barren), failed=True)
            barren.begin_anew()
        enough = BARREN_TOLD if barren.too_small else max(BARREN_TOLD, self._groups.limits.batch_groups)
        if barren.in_a_row >= enough and not self._barren_told:
            self._barren_told = True
            end = f"The run ends after {most} in a row (samples.max_barren_groups)"
            self.notice(f"{why_barren(barren)} {end}")

    def _tell_refused(self, name: str, found: str) -> None:
        """Once for each kind of flaw, whatever numbers it has."""
        kind = DIGITS.sub("", found)
        if kind not in self._flaws and len(self._flaws) < MOST_FLAWS and not found.startswith(FUTURE_VERSION):
            self._flaws.add(kind)
            self.notice(f"sample {name} was refused and ends as failed, and so do others like it: {found}")

    def _tell_gone(self, gone: Sequence[str]) -> None:
        self.metrics.count("samples/damaged", len(gone))
        one = f"1 sample is gone or damaged ({gone[0]}): its group trains without it, and ends"
        more = f"{len(gone)} samples are gone or damaged ({gone[0]} first): their groups train without them, and end"
        self.notice(f"{one if len(gone) == 1 else more} where fewer than {MIN_SCORED} are left")

    async def _incarnation_of(self, holder: str) -> int:
        lease = await self._journal.retried(lambda: self.store.held(f"actor/{holder}"))
        return lease.token if lease is not None else NO_LEASE

    async def _drains(self, holder: str) -> bool:
        lease = await self._journal.retried(lambda: self.store.held(f"actor/{holder}"))
        return lease is not None and msgspec.msgpack.decode(lease.value, type=ActorRecord).state == "draining"

    def _held_up(self, why: tuple[str, str]) -> tuple[str, str]:
        """With the actor that stands for environment managers where the job has one in their place."""
        managers = self.peers(ENV_MANAGER)
        return (why[0], managers[0]) if len(managers) == 1 and why[1] == ENV_MANAGER else why

    def _now(self) -> float:
        return asyncio.get_running_loop().time()


def _built_in(config: BatchSections) -> list[str]:
    """Plug-ins that a section of their own names."""
    return [target for target, key in batch_policies(config) if key != "samples.policy"]
