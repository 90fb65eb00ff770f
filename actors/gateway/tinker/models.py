"""One model of a tenant: operations are taken in, carried out by the trainer in the order of their seq_id, and answered, each once."""

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import msgspec

from rubato.actors.gateway.session import Refused
from rubato.actors.gateway.tinker.ages import Judged
from rubato.actors.gateway.tinker.journal import Entry, Kind, ModelJournal, Named, Owned, Pending, Result, Told, digest_of, packed
from rubato.actors.gateway.tinker.wire import computed, metrics_in
from rubato.actors.messages.tinker import (
    Begin,
    Behind,
    Computed,
    Follow,
    ForwardBackward,
    Load,
    Operate,
    Operated,
    OperationFailed,
    Stepped,
    changes,
)
from rubato.bus.errors import AskFailed, Failed
from rubato.runtime.observe.trace import wall_s

if TYPE_CHECKING:
    from rubato.actors.gateway.tinker.server import TinkerServer

TRAINER = "trainer"

ASK_S = 900.0
"""Longest that one ask of the trainer lasts; it is asked again."""

PAUSES_S = (0.25, 5.0)
"""Before it is asked again after it could not answer: the first, and the longest."""

MOST_TRIES = 3
"""Of an operation that the trainer raises at."""

NONE = -1
"""In place of an operation's number."""

AHEAD = 4096
"""How far before its turn an operation may come in."""


class Model:
    """Its operations are kept in the journal before they are acknowledged, and what came of them before a client reads it."""

    def __init__(self, server: "TinkerServer", journal: ModelJournal, owned: Owned) -> None:
        self.owned, self.journal = owned, journal
        self.over = False
        """It is unloaded."""
        self.version = 0
        """Where it stands, by the newest result."""
        self._server = server
        self._section = server.config.tinker
        self._next = 0
        """The seq that is carried out next."""
        self._changed_at = -1
        """The newest one that changed the model."""
        self._waiting: dict[int, Pending] = {}
        self._since: dict[int, float] = {}
        """Loop time at which each of them came in."""
        self._log: dict[int, Pending] = {}
        """Carried out, and covered by no file of the trainer: wanted again where that begins anew."""
        self._covered = -1
        self._results: dict[int, Result] = {}
        self._writing: dict[int, asyncio.Event] = {}
        self._settled: dict[int, asyncio.Event] = {}
        self._news = asyncio.Event()
        self._gathered = Judged()
        """Of what was computed since the newest step."""
        self._doubtful = False
        """The trainer may have begun anew since it was asked last."""
        self._lost = ""
        """Why the model can't go on, one sentence."""
        self.task: asyncio.Task[None] | None = None

    @property
    def pending_bytes(self) -> int:
        return sum(each.size for each in self._waiting.values())

    def load(self) -> None:
        """What a server of before left. Blocks."""
        for result in self.journal.results():
            self._results[result.seq] = result
            if not result.failed:
                self.version = result.version
                self._changed_at = result.seq if result.changed else self._changed_at
        self._covered = self.journal.covered()
        self._next = self._open()
        for each in self.journal.pending():
            result = self._results.get(each.seq)
            if each.seq <= self._covered or (result is not None and (result.failed or not result.changed)):
                self.journal.drop([each])
            elif each.seq < self._next:  # carried out, though its result may be kept no more
                self._log[each.seq] = each
            else:
                self._waiting[each.seq], self._since[each.seq] = each, self._now()
        self._gathered = self._read_gathered()
        self._doubtful = True

    def _open(self) -> int:
        """The first that has not had its turn: one can be refused before its turn comes, but is carried out in it."""
        first = max((seq for seq, result in self._results.items() if not result.failed), default=-1) + 1
        if len(self._results) >= self._section.results_kept:  # those before are kept no more, beside the newest change
            first = max(first, min(seq for seq in self._results if seq != self._changed_at))
        while first in self._results:
            first += 1
        return first

    def _read_gathered(self) -> Judged:
        """Of what was computed since the newest step, by the results that are kept."""
        found = Judged()
        for result in reversed(self._results.values()):
            told = self.journal.told(result) if result.changed else None
            if told is None:
                continue
            if told.kind == "pb":
                found += Judged.of_metrics(*metrics_in(told.body))
            elif msgspec.json.decode(told.body)["type"] != "save_weights_for_sampler":
                break
        return found

    def begin(self) -> None:
        self.task = self._server.spawn(self._carry_out(), name=f"{self._server.name}.{self.owned.id}")

    # -- what comes in -----------------------------------------------------------------------------------------------

    async def accept(self, seq: int, entry: Entry) -> None:
        """It is carried out in its turn, for good, once this returns. Raises Refused."""
        data = await self._server.offload(packed, entry)
        digest = digest_of(data)
        if await self._is_known(seq, digest):
            return
        self._check_room(seq, len(data))
        async with self.writing(seq):
            await self._server.on_disk(self.journal.folder, self.journal.keep, seq, data)
            self._waiting[seq], self._since[seq] = Pending(seq, digest, len(data)), self._now()
        self._news.set()

    async def refuse(self, seq: int, body: bytes, why: str) -> None:
        """An operation that can't be carried out has its turn, and its client's error. Raises Refused."""
        digest = digest_of(body)
        if await self._is_known(seq, digest):
            return
        self._check_room(seq, 0)
        async with self.writing(seq):
            await self._settle(seq, digest, why, "user")
        self._news.set()

    async def _is_known(self, seq: int, digest: str) -> bool:
        """Raises Refused where another one had this place."""
        while seq in self._writing:
            await self._writing[seq].wait()
        known = self._waiting.get(seq) or self._results.get(seq)
        if known is None and seq < self._next:
            raise Refused(400, "seq_id_over", f"what came of seq_id {seq} is kept no more: the model is at {self._next}")
        if known is not None and known.digest != digest:
            raise Refused(400, "seq_id_taken", f"seq_id {seq} was another request before; a model's requests have numbers of their own")
        return known is not None

    def _check_room(self, seq: int, size: int) -> None:
        if self.over:
            raise Refused(404, "unknown_model", f"there is no model {self.owned.id!r}: it is unloaded")
        if seq > self._next + AHEAD:
            raise Refused(400, "seq_id_ahead", f"seq_id {seq} is far before its turn: the model is at {self._next}")
        if len(self._waiting) >= self._section.max_pending and seq != self._next:
            raise Refused(429, "too_many_pending", f"tinker.max_pending={self._section.max_pending} operations of the model wait already")
        if self._server.pending_bytes + size > self._section.max_pending_mb * 2**20 and seq != self._next:
            raise Refused(429, "too_much_pending", f"tinker.max_pending_mb={self._section.max_pending_mb} MiB of operations wait already")

    def writing(self, seq: int) -> "_Writing":
        """A block in which its operation is written; with NONE what it is itself."""
        return _Writing(self._writing, seq)

    async def end(self) -> None:
        """Nothing is taken in any more, and nothing is being written once this returns."""
        self.over = True
        if self.task is not None:
            self.task.cancel()
        while self._writing:
            await next(iter(self._writing.values())).wait()

    # -- what goes out -----------------------------------------------------------------------------------------------

    def knows(self, seq: int) -> bool:
        return seq in self._waiting or seq in self._results

    async def told(self, seq: int, wait_s: float) -> Told | None:
        """What came of it; None where that is not there yet. Raises Refused for one that isn't known."""
        if not self.knows(seq):
            raise Refused(410, "unknown_request", "no such request is known: it was answered long ago, or never came in")
        if seq not in self._results:
            with suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._settled.setdefault(seq, asyncio.Event()).wait()
        result = self._results.get(seq)
        if result is None:
            return None
        told = await self._server.offload(self.journal.told, result)
        if told is None:
            raise Refused(410, "unknown_request", "what came of the request is kept no more")
        return told

    def why_waiting(self) -> tuple[str, str]:
        """In the SDK's words, and in ours."""
        if not self._server.peers(TRAINER):
            return "paused_capacity", "the trainer is coming back"
        if self._waiting and self._next not in self._waiting:
            return "active", f"the request with seq_id {self._next} has not come in"
        return "active", ""

    # -- carrying out ------------------------------------------------------------------------------------------------

    def doubt(self) -> None:
        """The trainer may have begun anew."""
        self._doubtful = True
        self._news.set()

    async def _carry_out(self) -> None:
        while True:
            each = await self._turn()
            if each is None:
                await self._revive()
                continue
            await self._one(each)
            while self._next in self._results:
                self._next += 1

    async def _turn(self) -> Pending | None:
        """The operation whose turn it is; None where none is there, and the trainer may have begun anew."""
        while True:
            while self._next in self._results:
                self._next += 1
            if self._next in self._waiting:
                return self._waiting[self._next]
            if self._doubtful:
                return None
            self._news.clear()
            limit = min(self._since.values(), default=None)
            try:
                async with asyncio.timeout_at(None if limit is None else limit + self._section.order_s):
                    await self._news.wait()
            except TimeoutError:
                await self._give_up_on_gap()

    async def _give_up_on_gap(self) -> None:
        late = [seq for seq, since in self._since.items() if since + self._section.order_s <= self._now()]
        for seq in late:
            why = f"the request with seq_id {self._next} did not come in within tinker.order_s={self._section.order_s:g} s of this one"
            await self._finish(self._waiting[seq], f"{why}, which stands behind it", "user")

    async def _one(self, each: Pending) -> None:
        entry = await self._server.offload(self.journal.entry, each)
        operation = entry.operation
        if self._lost or (self._changed_at < 0 and not isinstance(operation, Begin)):
            await self._finish(
                each, self._lost or "the model was not created: its first request failed", "server" if self._lost else "user"
            )
            return
        if taken := await self._taken(entry, each.seq):
            await self._finish(each, taken, "user")
            return
        judged = Judged()
        if isinstance(operation, ForwardBackward):
            judged = self._server.ages.judged(self.owned.id, self.version, self._section.alpha, operation, entry.samples)
            if judged.flaw:
                await self._finish(each, judged.flaw, "user")
                return
        while True:
            reply = await self._ask(Operate(self.owned.id, each.seq, self._changed_at, operation))
            if not isinstance(reply, Behind):
                break
            await self._send_again(reply.covered)
            if self._lost:
                await self._finish(each, self._lost, "server")
                return
        if isinstance(reply, OperationFailed):
            await self._finish(each, reply.reason, reply.category)
            return
        if isinstance(operation, ForwardBackward) and not operation.forward_only:
            self._gathered += judged
        body, kind = await self._body(entry, reply, judged)
        await self._note(entry, each.seq, reply)
        await self._settle(each.seq, each.digest, body, kind, reply, changed=changes(operation))
        del self._waiting[each.seq], self._since[each.seq]
        if changes(operation):
            self._log[each.seq] = each
        else:
            await self._server.offload(self.journal.drop, [each])
        await self._cover(reply.covered)

    async def _taken(self, entry: Entry, seq: int) -> str:
        """Why what is to come of an operation can't have its name; empty: it can."""
        if entry.name and not entry.overwrite:
            named = await self._server.offload(self.journal.named, entry.area, entry.name)
            if named is not None and named.seq != seq:
                return f"{entry.name} is saved already: take another name, or overwrite it"
        if entry.sampler and self._server.sampling.is_another(self._server.sampling.made_of(self.owned, entry, seq, self.version)):
            return f"there is a sampling session {entry.sampler} already, of something else: take another sampling_session_seq_id"
        return ""

    async def _body(self, entry: Entry, reply: Operated, judged: Judged) -> tuple[bytes, Kind]:
        outcome, operation = reply.outcome, entry.operation
        if isinstance(outcome, Computed) and isinstance(operation, ForwardBackward):
            return await self._server.offload(computed, outcome, operation.data, judged.metrics(reduced=True)), "pb"
        if isinstance(outcome, Stepped):
            told = {"type": "optim_step", "metrics": {**outcome.metrics, **self._gathered.metrics(reduced=False)}}
            self._gathered = Judged()
            return msgspec.json.encode(told), "json"
        if isinstance(operation, Load):  # what has gathered is dropped
            self._gathered = Judged()
        return msgspec.json.encode(entry.answer), "json"

    async def _note(self, entry: Entry, seq: int, reply: Operated) -> None:
        """Keep what else comes of an operation, before its client hears of it."""
        version = getattr(reply.outcome, "version", self.version)
        if entry.name:
            now = wall_s()
            named = Named(seq, version, now, None if entry.ttl_s is None else now + entry.ttl_s, entry.metadata)
            await self._server.on_disk(self.journal.folder, self.journal.name, entry.area, entry.name, named)
        if entry.sampler:
            await self._server.sampling.open_of(self.owned, entry, seq, version)

    async def _finish(self, each: Pending, why: str, category: str) -> None:
        await self._settle(each.seq, each.digest, why, category)
        self._waiting.pop(each.seq, None)
        self._since.pop(each.seq, None)
        await self._server.offload(self.journal.drop, [each])

    async def _settle(
        self, seq: int, digest: str, body: bytes | str, kind: str, reply: Operated | None = None, *, changed: bool = False
    ) -> None:
        """Keep the result, then let clients see it. Where `body` is a sentence, `kind` is the category of the error."""
        version = self.version if reply is None else getattr(reply.outcome, "version", self.version)
        if isinstance(body, str):
            body, kind = msgspec.json.encode({"error": body, "category": kind}), "failed"
        told: Any = kind
        result = Result(seq, digest, version, changed, told, len(body))
        await self._server.on_disk(self.journal.folder, self.journal.settle, result, body)
        self._results[seq] = result
        self.version = version
        if changed:
            self._changed_at = seq
        if (event := self._settled.pop(seq, None)) is not None:
            event.set()
        await self._let_go()

    async def _let_go(self) -> None:
        """Of results beyond what is kept; never of the newest, nor of the newest change."""
        size = sum(each.size for each in self._results.values())
        gone: list[Result] = []
        for seq in sorted(self._results)[:-1]:
            if len(self._results) - len(gone) <= self._section.results_kept and size <= self._section.results_mb * 2**20:
                break
            if seq != self._changed_at:
                gone.append(self._results[seq])
                size -= self._results[seq].size
        if gone:
            await self._server.offload(self.journal.forget, gone)
            for each in gone:
                del self._results[each.seq]

    async def _cover(self, covered: int) -> None:
        gone = [self._log.pop(seq) for seq in sorted(self._log) if seq <= covered]
        if gone:
            self._covered = gone[-1].seq
            await self._server.on_disk(self.journal.folder, self.journal.cover, self._covered)
            await self._server.offload(self.journal.drop, gone)

    # -- a trainer that began anew -----------------------------------------------------------------------------------

    async def _revive(self) -> None:
        """Let a trainer that began anew have what it lacks, while nothing else is to be done."""
        self._doubtful = False
        if self._changed_at < 0 or self._lost:
            return
        # What comes behind itself is carried out by no trainer: one that has it says what came of it, another what it has.
        reply = await self._ask(Operate(self.owned.id, self._changed_at, self._changed_at, Follow()))
        if isinstance(reply, Behind):
            await self._send_again(reply.covered)

    async def _send_again(self, covered: int) -> None:
        """What the trainer lacks, in its order."""
        self._doubtful = False
        while True:
            if covered < self._covered:
                self._lost = f"the trainer's files have the model as it was after operation {covered}, not {self._covered} as before"
                self._server.log.error("tinker_model_lost", model=self.owned.id, covered=covered, was=self._covered)
                return
            again = await self._replay([seq for seq in sorted(self._log) if seq > covered], covered)
            if again is None:
                return
            covered = again

    async def _replay(self, wanted: list[int], after: int) -> int | None:
        """None once all are carried out; else what the trainer, which began anew meanwhile, has."""
        self._server.log.info("tinker_replays", model=self.owned.id, after=after, operations=len(wanted))
        for seq in wanted:
            entry = await self._server.offload(self.journal.entry, self._log[seq])
            pause_s = PAUSES_S[0]
            while True:
                reply = await self._ask(Operate(self.owned.id, seq, after, entry.operation))
                if isinstance(reply, Behind):
                    return reply.covered
                if isinstance(reply, Operated):
                    break
                self._server.log.warning("tinker_not_replayed", model=self.owned.id, seq=seq, error=reply.reason)
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, PAUSES_S[1])
            after = seq
        return None

    async def _ask(self, request: Operate) -> Operated | Behind | OperationFailed:
        """Until the trainer answered, however often it is restarted meanwhile."""
        pause_s, tries = PAUSES_S[0], 0
        while True:
            try:
                with self._server.waits.on(f"{self.owned.id}:{request.seq}", stage="train", holder=TRAINER):
                    return await self._server.ref(TRAINER).ask(request, timeout=ASK_S)
            except Failed as error:
                tries += 1
                if tries == MOST_TRIES:
                    return OperationFailed(request.seq, f"the trainer could not carry it out: {error}", "server")
                self._server.log.warning("tinker_operation_raised", model=self.owned.id, seq=request.seq, error=str(error))
            except AskFailed as error:
                self._server.log.info("tinker_trainer_away", model=self.owned.id, seq=request.seq, error=str(error))
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, PAUSES_S[1])

    def _now(self) -> float:
        return self._server.loop.time()


class _Writing:
    """A block in which one operation is written: a request that brings the same waits for its end."""

    def __init__(self, writing: dict[int, asyncio.Event], seq: int) -> None:
        self._writing, self._seq = writing, seq

    async def __aenter__(self) -> None:
        self._writing[self._seq] = asyncio.Event()

    async def __aexit__(self, *why: object) -> None:
        self._writing.pop(self._seq).set()
