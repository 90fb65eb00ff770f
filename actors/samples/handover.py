"""Hands batches to the trainer: a step's samples are bound once, trained in order, and committed behind a durable checkpoint."""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING

from actors.messages.samples import Advance, Batch, Claim, Commit, Confirm, DrawEpoch, Epoch, NotReady
from actors.samples.book import Book
from actors.samples.intake import Intake, Wakes
from actors.samples.journal import Journal
from actors.samples.repair import Repair
from actors.samples.sample import PayloadLost, is_filed
from planning.staleness import HandOver, hand_over, min_version
from runtime.store.errors import OutOfOrder, StaleEpoch
from runtime.store.workset import Claimed, Item, WorkSet

if TYPE_CHECKING:
    from structlog.typing import FilteringBoundLogger


class TrainerDesk:
    """One trainer at a time, told apart by its epoch. Raises StaleEpoch to one that was replaced."""

    def __init__(
        self,
        book: Book,
        journal: Journal,
        workset: WorkSet,
        wakes: Wakes,
        intake: Intake,
        repair: Repair,
        read_payload: Callable[[bytes], Awaitable[bytes]],
        log: "FilteringBoundLogger",
    ) -> None:
        self._book = book
        self._journal = journal
        self._workset = workset
        self._wakes = wakes
        self._intake = intake
        self._repair = repair
        self._read_payload = read_payload
        self._log = log
        self._turn = asyncio.Lock()
        """No epoch is drawn between a claim and what the book makes of it, or while another one is drawn: answers may come late."""

    async def draw_epoch(self, request: DrawEpoch) -> Epoch:
        """A trainer takes over from its checkpoint of `request.step`, which is committed here if it was not."""
        async with self._turn:
            return await self._draw_epoch(request)

    async def _draw_epoch(self, request: DrawEpoch) -> Epoch:
        epoch = await self._journal.steadily(partial(self._workset.new_epoch, request.at_least))
        self._book.epoch = epoch
        await self._commit(request.step, epoch)
        await self._advance(request.step)
        counts = await self._journal.steadily(self._workset.counts)
        self._book.rebound(counts.committed, set(counts.bound_steps))
        await self._journal.flush()
        self._log.info("epoch_drawn", epoch=epoch, committed=counts.committed, bound=counts.bound_steps)
        return Epoch(epoch=epoch, committed=counts.committed, bound=counts.bound_steps)

    async def plan(self, request: Claim) -> HandOver:
        """Whether the batch may be claimed now. A bound step is handed out again without asking about age.

        Whoever claims a step has trained those before, also where it did not say so, or the Store forgot that it did. Groups that
        are too old for it are ended first: they hold slots, and one that was just being sealed when that step ended is noticed here only.
        """
        oldest = min_version(request.step, self._book.alpha)
        if not self._is_bound(request):
            await self._intake.drop_old(oldest)
        if self._is_bound(request):
            return HandOver(True, oldest, "bound before")
        return hand_over(self._book.supply(request.step, request.groups))

    async def claim(self, request: Claim) -> Batch | NotReady:
        """Bind the batch if the plan still says so."""
        plan = await self.plan(request)
        if not plan.take:
            return self.not_ready(request, plan)
        await self._journal.flush()
        bind = partial(self._workset.claim, request.groups, plan.min_version, request.step, request.epoch)
        async with self._turn:
            return await self._claimed(request, plan, await self._journal.steadily(bind))

    async def _claimed(self, request: Claim, plan: HandOver, claimed: Claimed) -> Batch | NotReady:
        stale = sum(
            self._intake.dropped_as_stale(self._book.groups[name])
            for name in claimed.dropped
            if name in self._book.groups
        )
        if not claimed.groups:
            await self._repair.find_lost()
            return self.not_ready(request, plan)
        if self._book.bind(request.step, {name for name, _ in claimed.groups}):
            await self._repair.find_lost()
        groups = [await self._payloads(items) for _, items in claimed.groups]
        return Batch.of(request.step, groups, stale)

    def not_ready(self, request: Claim, plan: HandOver) -> NotReady:
        """The answer when the wait ends without a batch."""
        ready = sum(1 for _ in self._book.ready())
        return NotReady(ready=ready, wanted=request.groups, why=plan.why)

    async def advance(self, request: Advance) -> None:
        """Step `request.step` was trained: its slots are free."""
        self._check(request.epoch)
        await self._advance(request.step)
        await self._intake.drop_old(min_version(self._book.base + 1, self._book.alpha))

    async def confirm(self, request: Confirm) -> None:
        """Raises OutOfOrder where a step up to `request.step` is neither committed nor bound: the Store forgot its claim."""
        self._check(request.epoch)
        counts = await self._journal.steadily(self._workset.counts)
        steps = range(counts.committed + 1, request.step + 1)
        if forgotten := [step for step in steps if step not in counts.bound_steps]:
            raise OutOfOrder(f"the store forgot the samples of step {forgotten[0]}: it is to be trained again")

    async def commit(self, request: Commit) -> None:
        """Steps up to `request.step` are covered by a durable checkpoint."""
        self._check(request.epoch)
        await self._commit(request.step, request.epoch)

    async def _payloads(self, items: tuple[Item, ...]) -> tuple[bytes, ...]:
        """What the trainer gets of a group. A damaged file costs its sample, not the step, which is bound for good."""
        payloads: list[bytes] = []
        for item in items:
            try:
                payloads.append(await self._read_payload(item.payload) if is_filed(item.payload) else item.payload)
            except PayloadLost as error:
                self._log.error("sample_unreadable", trajectory=item.id, error=str(error))
        return tuple(payloads)

    async def _advance(self, step: int) -> None:
        self._trained(step)
        await self._journal.flush()

    def _trained(self, step: int) -> None:
        """Steps up to `step` are trained, maybe anew, because the Store forgot them: their slots are free."""
        if step > self._book.version:
            self._book.version = step
            self._book.moved()
            self._wakes.slots.set()
            self._wakes.supply.set()
        if trained := [g for g in self._book.groups.values() if 0 < g.step <= step]:
            for group in trained:
                self._book.let_go(group)
            self._wakes.slots.set()
            self._wakes.supply.set()

    async def _commit(self, step: int, epoch: int) -> None:
        """A Store that lost its newest writes may have forgotten commits: it is asked how far it came."""
        counts = await self._journal.steadily(self._workset.counts)
        for each in range(min(self._book.committed, counts.committed) + 1, step + 1):
            await self._journal.steadily(partial(self._workset.commit, each, epoch))
            self._book.committed = max(self._book.committed, each)
            self._book.bound.discard(each)
            self._book.commit(each)
            self._wakes.ended.set()
        await self._journal.flush()

    def _is_bound(self, request: Claim) -> bool:
        self._check(request.epoch)
        self._trained(request.step - 1)
        if request.step in self._book.bound:
            return True
        if request.step <= self._book.committed:
            raise OutOfOrder(f"step {request.step} was claimed, but {self._book.committed} is committed already")
        return False

    def _check(self, epoch: int) -> None:
        self._book.epoch = max(self._book.epoch, epoch)
        if epoch < self._book.epoch:
            raise StaleEpoch(f"epoch {epoch} acts, but {self._book.epoch} is the newest: another trainer took over")
