"""SampleBuffer: the only source of work and the only judge of age; a slot is freed when its group was trained or dropped."""

import asyncio
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from pydantic import Field

from actors.config import StalenessSection, TrainSection
from actors.messages.samples import (
    Admit,
    Advance,
    Batch,
    Claim,
    Close,
    Commit,
    Confirm,
    DrawEpoch,
    Epoch,
    EvalResult,
    Evaluate,
    GiveUp,
    Hold,
    NotReady,
    Put,
    Standing,
    Stored,
    Ticket,
    Tickets,
)
from actors.samples.book import Book, Limits
from actors.samples.evaluation import open_round, result
from actors.samples.handover import TrainerDesk
from actors.samples.holders import Holders
from actors.samples.intake import Intake, Wakes
from actors.samples.journal import Journal
from actors.samples.ledger import SampleLedger
from actors.samples.recovery import Records, rebuild
from actors.samples.repair import Repair
from actors.samples.sample import file_payload, read_payload
from actors.samples.section import SamplesSection
from actors.samples.waiting import ENV_MANAGER, gauges, why_no_tickets, why_unfinished, why_waiting
from bus.errors import AskFailed
from bus.message import Ack
from planning.staleness import HandOver
from runtime.actor import Actor, handler
from runtime.config import ActorConfig
from runtime.observe.waits import STORE, Wait
from runtime.store.errors import Fenced, StoreError
from runtime.store.store import Fence

ResultT = TypeVar("ResultT")

HINT_S = 1.0
"""A manager that grants no credit for this long misses the hint; every reply carries the standing too."""


class SampleBuffer(Actor):
    """Issues tickets, takes trajectories in, hands batches out. At its bounds callers wait: admission for slots, claims for groups."""

    role = "sample_buffer"
    least = most = 1

    class Config(ActorConfig):
        staleness: StalenessSection = Field(default_factory=StalenessSection)
        train: TrainSection = Field(default_factory=TrainSection)
        samples: SamplesSection = Field(default_factory=SamplesSection)

    config: Config

    async def on_start(self) -> None:
        """Rebuild from the Store, then serve."""
        self._closed = self._draining = False
        self._wakes = Wakes()
        fence = Fence(self.role, self.incarnation)
        workset = self.store.workset("samples", fence=fence)
        self._journal = Journal(self.store, fence, self.log, on_outage=self._outage)
        self._records = Records(self.store, self._journal)
        self._book = Book(self._limits(), self.config.staleness.bound, self._records.changed, self._records.moved)
        self._records.of(self._book)
        shared = (self._book, self._journal, workset, self._wakes)
        self._intake = Intake(*shared, self._file_payload, self.metrics, self.log)
        self._repair = Repair(*shared, self._records, self._intake)
        self._trainer = TrainerDesk(*shared, self._intake, self._repair, self._read_payload, self.log)
        self._holders = Holders(self._book, self._intake, self._journal, self.store, self.log)
        self._ledger = SampleLedger(
            self.run.folder, workset, self._journal, self.incarnation, self._store_forgot, self.offload, self.log
        )
        await rebuild(self._book, self._records, self._journal, workset, self._intake, self._now())
        await self._ledger.open()
        await self._holders.check_all()
        self.spawn(self._holders.watch_leases(), name="leases")
        self.spawn(self._ledger.follow(self._wakes.ended), name="ledger")
        gauges(self._book, self.metrics)
        self.log.info("rebuilt", version=self._book.version, groups=len(self._book.groups), lines=self._ledger.index)

    async def on_drain(self) -> None:
        """Admit nothing more. Everything acknowledged is durable already; the ledger is brought up to date."""
        self._draining = True
        await self._journal.flush()
        with suppress(OSError):
            await self._ledger.check()
            await self._repair.run()
            await self._ledger.check()

    async def on_peers(self, joined: tuple[str, ...], left: tuple[str, ...]) -> None:
        """Rollouts of an actor that went away are issued again at once."""
        for name in left:
            await self._holders.left(name, ready=name in self.peers(name.rpartition("-")[0]))

    # -- environment managers -----------------------------------------------------------------------------------

    @handler(concurrency=1024)
    async def admit(self, request: Admit) -> Tickets:
        if self._holders.replaced(request.holder, request.incarnation):
            self.spawn(self._holders.take_back(request.holder, request.incarnation), name="take_back")
        tickets: list[Ticket] = []
        with suppress(TimeoutError):
            async with asyncio.timeout(request.wait_s):
                while not (tickets := self._issue(request)) and not self._closed:
                    with self._waits_for_slots():
                        await self._wakes.slots.wait()
        sent = await self._send(tickets) if tickets else ()
        return Tickets(tickets=tuple(sent), standing=self._book.standing, closed=self._closed)

    @handler(concurrency=64)
    async def hold(self, request: Hold) -> Standing:
        await self._whole(self._holders.hold(request.holder, request.held))
        return self._book.standing

    @handler(concurrency=1024)
    async def put(self, request: Put) -> Stored:
        with self.waits.on(request.trajectory.ticket.trajectory_id, stage="intake", holder=STORE):
            fate = await self._whole(self._intake.put(request.trajectory))
        return Stored(fate=fate, standing=self._book.standing)

    @handler(concurrency=1024)
    async def give_up(self, request: GiveUp) -> Stored:
        with self.waits.on(request.ticket.trajectory_id, stage="intake", holder=STORE):
            fate = await self._whole(self._intake.give_up(request))
        return Stored(fate=fate, standing=self._book.standing)

    # -- the trainer --------------------------------------------------------------------------------------------

    @handler(concurrency=16)
    async def draw_epoch(self, request: DrawEpoch) -> Epoch:
        return await self._whole(self._trainer.draw_epoch(request))

    @handler(concurrency=16)
    async def claim(self, request: Claim) -> Batch | NotReady:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + request.wait_s
        while True:
            plan = await self._await_plan(request, deadline)
            if not plan.take:
                return self._trainer.not_ready(request, plan)
            changed = self._wakes.supply.next()
            reply = await self._whole(self._trainer.claim(request))
            gauges(self._book, self.metrics)
            if isinstance(reply, Batch):
                return reply
            with suppress(TimeoutError):
                async with asyncio.timeout_at(deadline):
                    await changed.wait()
            if loop.time() >= deadline:
                return reply

    @handler(concurrency=16)
    async def advance(self, request: Advance) -> Standing:
        before = self._book.version
        await self._whole(self._trainer.advance(request))
        if self._book.version > before:
            self.spawn(self._hint(), name="hint")
        gauges(self._book, self.metrics)
        return self._book.standing

    @handler(concurrency=16)
    async def confirm(self, request: Confirm) -> Ack:
        await self._whole(self._trainer.confirm(request))
        return Ack()

    @handler(concurrency=16)
    async def commit(self, request: Commit) -> Ack:
        await self._whole(self._trainer.commit(request))
        return Ack()

    @handler(concurrency=16)
    async def evaluate(self, request: Evaluate) -> EvalResult | NotReady:
        group = open_round(self._book, request.key, request.num, self._now())
        self._wakes.slots.set()
        wait = self.waits.on(f"evaluation {request.key}", stage="evaluation", idle=True)
        with wait.told(lambda: why_unfinished(group)), suppress(TimeoutError):
            async with asyncio.timeout(request.wait_s):
                while not group.complete:
                    await self._wakes.rounds.wait()
        if group.complete:
            return result(group)
        why = f"{group.num_settled} of {request.num} held-out tasks have an outcome"
        return NotReady(ready=group.num_settled, wanted=request.num, why=why)

    @handler(concurrency=16)
    async def close(self, request: Close) -> Ack:
        self._closed = True
        self._wakes.slots.set()
        await self._whole(self._intake.end_unused())
        self.log.info("closed", version=self._book.version)
        return Ack()

    # -- around it ----------------------------------------------------------------------------------------------

    def _issue(self, request: Admit) -> list[Ticket]:
        if not self._journal.healthy or self._closed or self._draining:
            return []
        tickets = self._book.issue(request.num, request.holder, request.incarnation, self._now())
        if tickets:
            self._holders.granted()
        return tickets

    async def _send(self, tickets: list[Ticket]) -> list[Ticket]:
        """Make them durable. An asker that gave up meanwhile never saw them; what was taken back meanwhile goes to nobody."""
        try:
            await self._whole(self._journal.flush())
        except asyncio.CancelledError:
            self._book.unsend(tickets)
            self._wakes.slots.set()
            raise
        return self._book.on_their_way(tickets, self._now())

    async def _await_plan(self, request: Claim, deadline: float) -> HandOver:
        changed = self._wakes.supply.next()
        plan = await self._whole(self._trainer.plan(request))
        limit = f"samples.ticket_ttl_s={self.config.samples.ticket_ttl_s:g}"
        wait = self.waits.on(f"batch {request.step}", stage="batch", limit=limit, idle=True)
        with wait.told(lambda: why_waiting(self._book, plan)), suppress(TimeoutError):
            async with asyncio.timeout_at(deadline):
                while not plan.take:
                    await changed.wait()
                    wait.moved()
                    changed = self._wakes.supply.next()
                    plan = await self._whole(self._trainer.plan(request))
        return plan

    def _waits_for_slots(self) -> Wait:
        wait = self.waits.on("tickets", stage="slots", limit=f"staleness.alpha={self._book.alpha}", idle=True)
        return wait.told(lambda: why_no_tickets(self._book))

    async def _whole(self, work: Coroutine[Any, Any, ResultT]) -> ResultT:
        """Run `work` to its end even if the asker goes away. What the Store refuses is the asker's error; being fenced is ours."""
        done: asyncio.Future[ResultT] = asyncio.get_running_loop().create_future()
        task = self.spawn(_settle(work, done), name="whole")
        task.add_done_callback(lambda _: work.close())
        return await done

    async def _hint(self) -> None:
        for name in self.peers(ENV_MANAGER):
            with suppress(AskFailed, TimeoutError):
                async with asyncio.timeout(HINT_S):
                    await self.ref(name).tell(self._book.standing)

    def _outage(self, away: bool) -> None:
        if not away:
            self._store_forgot()

    def _store_forgot(self) -> None:
        self._repair.ask()
        self.spawn(self._repair.run(), name="repair")

    async def _file_payload(self, name: str, payload: bytes) -> bytes:
        return await self.offload(file_payload, self.run.folder / "samples", name, payload)

    async def _read_payload(self, stored: bytes) -> bytes:
        return await self.offload(read_payload, self.run.folder / "samples", stored)

    def _limits(self) -> Limits:
        return Limits(
            group_size=self.config.train.group_size,
            batch_groups=self.config.train.batch_groups,
            steps=self.run.steps,
            run_seed=self.run.seed,
            max_attempts=self.config.samples.max_attempts,
            unbounded_batches=self.config.samples.unbounded_batches,
            ticket_ttl_s=self.config.samples.ticket_ttl_s,
        )

    def _now(self) -> float:
        return asyncio.get_running_loop().time()


async def _settle(work: Coroutine[Any, Any, ResultT], done: "asyncio.Future[ResultT]") -> None:
    try:
        value = await work
    except Fenced:
        raise
    except (StoreError, OSError, ValueError) as error:
        if not done.done():
            done.set_exception(error)
    else:
        if not done.done():
            done.set_result(value)
