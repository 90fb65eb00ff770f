"""The invariants of a run, checked as things happen and after every step."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from rubato.actors.messages.samples import Trajectory
from rubato.actors.samples.group import Group, SampleEnd, Training
from rubato.actors.samples.journal import ENDS, GROUP, PAYLOAD, TRAINING
from rubato.actors.samples.sample import trajectory_id
from rubato.bus.link import Account
from rubato.bus.transport import Delivery
from rubato.runtime.dispatch import Mailbox
from rubato.runtime.store.store import Append
from rubato.sim.simtest.process import ActorProcess
from rubato.sim.simtest.tokens import TokenChecks

ASK_SLACK_S = 1.5
"""Deadlines are swept twice a second in a simulation, and a busy loop sweeps late."""


class Violation(Exception):
    """`invariant` names the promise that was broken."""

    def __init__(self, invariant: str, text: str) -> None:
        super().__init__(f"{invariant}: {text}")
        self.invariant = invariant


@dataclass
class StoreTimeline:
    """What the store was told, as far as the store itself remembers it."""

    claims: dict[int, tuple[str, ...]] = field(default_factory=dict)
    """Step → ids, in the order of the first hand-over."""
    handed: dict[int, tuple[str, ...]] = field(default_factory=dict)
    """Step → ids in the order in which they were trained first."""
    trained_in: dict[str, int] = field(default_factory=dict)
    ends: dict[int, SampleEnd] = field(default_factory=dict)
    """By index."""
    training: Training = field(default_factory=Training)
    put: set[str] = field(default_factory=set)
    acknowledged: dict[str, int] = field(default_factory=dict)
    """Id → the attempt that was stored."""


class InvariantChecks:
    """Hears everything. The first violation stands; `broken` tells the world to stop."""

    def __init__(self, alpha: int, window: int) -> None:
        self.alpha, self.window = alpha, window
        self.violation: Violation | None = None
        self.now = lambda: 0.0
        self.timeline = StoreTimeline()
        self._saved: StoreTimeline | None = None
        self.lost_by_store: set[str] = set()
        """Put within a window that the store lost; acknowledged then, or later by a buffer that had not heard of the loss."""
        self.bounds: dict[tuple[int, str], int] = {}
        """(step, id) → α as the id was first bound to the step. A living buffer writes anew what the store lost, so no loss undoes it."""
        self.terms: set[int] = set()
        """All that were ever answered."""
        self.newest_term = 0
        """That was ever written."""
        self.num_losses = 0
        self._kept: set[tuple[str, int]] = set()
        self._given: set[tuple[str, int]] = set()
        """(request, number) of moves, by what became of them."""
        self.tokens = TokenChecks(self.fail)

    def fail(self, invariant: str, text: str) -> None:
        if self.violation is None:
            self.violation = Violation(invariant, f"{text} (at {self.now():.3f} s)")

    # -- the store ----------------------------------------------------------------------------------------------

    def window_begins(self) -> None:
        """The store keeps what it has now, and will lose what follows."""
        self._saved = copy.deepcopy(self.timeline)

    def store_lost(self) -> None:
        if self._saved is not None:
            self.lost_by_store |= self.timeline.put - self._saved.put
            self.timeline, self._saved = self._saved, None
            self.num_losses += 1

    def commits(self, method: str, args: tuple[Any, ...]) -> bool:
        """Whether this call makes a COMMIT durable."""
        record = args[0].get(TRAINING) if method == "write" else None
        return record is not None and _training(record).committed > self.timeline.training.committed

    def applied(self, method: str, args: tuple[Any, ...]) -> None:
        """A call took effect in the store."""
        if method != "write":
            return
        changes, _, _, append = args
        groups = [_group(value) for key, value in changes.items() if key.startswith(GROUP) and value is not None]
        for step in sorted({group.step for group in groups if group.step}):
            self._bound(step, [group for group in groups if group.step == step])
        self.timeline.put |= {key.removeprefix(PAYLOAD) for key, v in changes.items() if key.startswith(PAYLOAD) and v}
        if append is not None and append.stream == ENDS:
            self._ended(append)
        if changes.get(TRAINING) is not None:
            self._moved(_training(changes[TRAINING]))

    def _bound(self, step: int, groups: list[Group]) -> None:
        ordered = sorted(groups, key=lambda group: (group.version(0), group.id))
        ids = tuple(trajectory_id(group.id, index) for group in ordered for index in group.scored)
        before = self.timeline.claims.setdefault(step, ids)
        is_lower = any(self.bounds.get((step, name), self.alpha) > self.alpha for name in before)
        for name in ids:
            self.bounds.setdefault((step, name), self.alpha)
        if set(ids) <= set(before):  # a write of some of its groups may have only these
            return
        if not is_lower:
            self.fail("replay", f"step {step} was bound to {before}, and then also to {ids}")
        # α was lowered since: what is too old for it is sampled anew, and the step is bound to that.
        self.timeline.claims[step] = ids
        self.timeline.handed.pop(step, None)

    def _ended(self, append: Append) -> None:
        line = self.timeline
        for index in [index for index in line.ends if index >= append.first]:
            del line.ends[index]
        for index, entry in enumerate(append.entries, append.first):
            end = line.ends[index] = msgspec.msgpack.decode(entry, type=SampleEnd)
            other = line.trained_in.setdefault(end.trajectory_id, end.step) if end.step else end.step
            if other != end.step:
                self.fail("one step per sample", f"{end.trajectory_id} is committed in steps {other} and {end.step}")

    def _moved(self, training: Training) -> None:
        before = self.timeline.training
        if training.term < before.term and not self.num_losses:
            self.fail("one committer per term", f"term {training.term} is written after {before.term}")
        if training.committed < before.committed and not self.num_losses:
            self.fail("gapless steps", f"step {training.committed} is the last committed, after {before.committed}")
        self.timeline.training = training
        self.newest_term = max(self.newest_term, training.term)

    # -- actors -------------------------------------------------------------------------------------------------

    def drew(self, term: int) -> None:
        """The buffer answered a trainer with `term`; none is given twice, whatever the Store forgot."""
        if term in self.terms:
            self.fail("one committer per term", f"term {term} was drawn twice")
        if term > self.newest_term:
            self.fail("one committer per term", f"term {term} was answered before it was durable")
        self.terms.add(term)

    def kept(self, move: tuple[str, int]) -> None:
        """An engine goes on with a request that it had parked for this move."""
        self._kept.add(move)
        self._moves_once(move)

    def given(self, move: tuple[str, int]) -> None:
        """An engine let another one go on with it."""
        self._given.add(move)
        self._moves_once(move)

    def _moves_once(self, move: tuple[str, int]) -> None:
        if move in self._kept and move in self._given:
            self.fail("one engine per request", f"{move[0]} was kept and given away in its move {move[1]:#x}")

    def stored(self, trajectory: Trajectory, fate: str) -> None:
        """The buffer acknowledged a Put."""
        self.tokens.stored(trajectory)
        ticket = trajectory.ticket
        if ticket.purpose == "train" and fate != "superseded":
            known = self.timeline.acknowledged.get(ticket.trajectory_id)
            if fate == "" and known not in (None, ticket.attempt) and ticket.trajectory_id not in self.lost_by_store:
                self.fail("one attempt per sample", f"{ticket.trajectory_id}: attempts {known} and {ticket.attempt} were both taken")
            if fate == "":
                self.timeline.acknowledged[ticket.trajectory_id] = ticket.attempt
        versions = {span.version for segment in trajectory.segments for span in segment.spans}
        if ticket.purpose == "eval" and fate == "" and versions != {ticket.version}:
            self.fail("exact evaluations", f"{ticket.trajectory_id} evaluates {ticket.version} with {sorted(versions)}")

    def trainer_answered(self, what: str, step: int, term: int, newest: int) -> None:
        """The buffer gave a trainer of `term` its batch, or told it that its checkpoint counts; `newest` is the term it knows of."""
        if term < newest:
            self.fail("one committer per term", f"{what} of step {step} under term {term} was answered, {newest} is the newest")

    def trained(self, step: int, groups: list[list[Trajectory]], history: list[list[str]], *, term: int) -> None:
        """A trainer of `term` updates its weights; `history` is what they were made of before."""
        if step != len(history) + 1:
            self.fail("gapless steps", f"step {step} is trained on weights of {len(history)} steps")
        ids = tuple(t.ticket.trajectory_id for group in groups for t in group)
        # A claim that the store lost binds no step any more, unless the buffer lives and writes it anew. A trainer that was frozen
        # with such a batch and replaced since may train on it once it thaws: what it makes can't be committed (`trainer_answered`).
        in_vain = self.num_losses > 0 and term < self.newest_term
        bound = step in self.timeline.claims and not in_vain
        if bound and (first := self.timeline.handed.setdefault(step, ids)) != ids:
            self.fail("replay", f"step {step} was trained on {first}, and again on {ids}")
        before = {name: at for at, ids in enumerate(history, 1) for name in ids}
        seen: set[str] = set()
        for trajectory in (t for group in groups for t in group):
            name, age = trajectory.ticket.trajectory_id, step - 1 - trajectory.version_first
            if name in before or name in seen:
                self.fail("one step per sample", f"{name} is trained in steps {before.get(name, step)} and {step}")
            seen.add(name)
            alpha = self.bounds.get((step, name), self.alpha)
            if age > alpha:
                self.fail("age", f"{name} has age {age} in step {step}; α is {alpha}")
            if trajectory.version_first < trajectory.ticket.version:
                self.fail("age", f"{name} begins with version {trajectory.version_first}, its ticket says {trajectory.ticket.version}")

    # -- processes ----------------------------------------------------------------------------------------------

    def check(self, processes: Sequence[ActorProcess], now: float) -> None:
        """After every step: asks end, credit is kept."""
        for process in processes:
            kernel = process.kernel
            if kernel is None or not process.alive or process.frozen or process.slowness_s or process.held:
                continue
            courier: Any = kernel.courier
            for pending in courier._pending.values():
                if pending.deadline + ASK_SLACK_S < now and process.thawed_at + ASK_SLACK_S < now:
                    what = pending.kind.__name__
                    self.fail("every ask ends", f"{process.name} still waits for {what}, due at {pending.deadline:.3f} s")
            for (address, _), route in courier._routes.items():
                self._check_account(process, address, route.account)

    def _check_account(self, process: ActorProcess, address: str, account: Account) -> None:
        if not (0 <= account.messages <= self.window and account.size_bytes >= 0):
            self.fail("credit", f"{process.name} has {account.messages} messages of credit at {address}, of {self.window}")

    # -- the end ------------------------------------------------------------------------------------------------

    def ended(self, log: Sequence[tuple[int, bytes]], lines: Sequence[dict[str, Any]]) -> None:
        """The whole log of ends, and what samples.jsonl says of it."""
        if [index for index, _ in log] != list(range(1, len(log) + 1)):
            self.fail("ledger", "the log of ends has gaps")
        entries = [msgspec.msgpack.decode(value, type=SampleEnd) for _, value in log]
        told = [(line["trajectory_id"], line["fate"], line["step"] or 0) for line in lines]
        happened = [(entry.trajectory_id, entry.fate, entry.step) for entry in entries]
        if told != happened:
            first = next((i for i, (a, b) in enumerate(zip(told, happened, strict=False)) if a != b), min(len(told), len(happened)))
            self.fail("ledger", f"samples.jsonl has {len(told)} lines for {len(happened)} ends; the first to differ is line {first + 1}")
        fates: dict[str, SampleEnd] = {}
        for entry in entries:
            name = entry.trajectory_id
            if name in fates:
                self.fail("one fate per sample", f"{name} ended as {fates[name].fate} and {entry.fate}")
            fates[name] = entry
        for name, attempt in self.timeline.acknowledged.items():
            self._check_kept(name, attempt, fates.get(name))

    def balanced(self, training: Training, groups: Sequence[Group], log: Sequence[tuple[int, bytes]]) -> None:
        """Every token that was reported is held by a group that lives, or has its fate, as the log of ends says."""
        tokens, held = training.tally.tokens, sum(sum(group.held_tokens) for group in groups)
        if training.tally.generated != sum(tokens.values()) + held:
            self.fail("tokens balance", f"{training.tally.generated} were generated, {held} are held, and {tokens}")
        told: dict[str, int] = {}
        for end in (msgspec.msgpack.decode(value, type=SampleEnd) for _, value in log):
            told[end.fate] = told.get(end.fate, 0) + max(0, end.outcome.tokens)  # below 0: not reported
        for fate in ("trained", "zero_spread", "failed", "lost", "poisoned"):  # the others may be reported late
            if told.get(fate, 0) != tokens.get(fate, 0):
                self.fail("tokens balance", f"{tokens.get(fate, 0)} tokens are {fate}; the ends have {told.get(fate, 0)}")

    def _check_kept(self, name: str, attempt: int, end: SampleEnd | None) -> None:
        if end is None:
            self.fail("no acknowledged sample is lost", f"{name} was acknowledged and has no fate")
        elif name not in self.lost_by_store and (end.fate == "lost" or end.attempt != attempt):
            self.fail(
                "no acknowledged sample is lost",
                f"{name}: attempt {attempt} was acknowledged; it ended {end.fate} with attempt {end.attempt}",
            )


def _group(record: bytes) -> Group:
    return msgspec.msgpack.decode(record, type=Group)


def _training(record: bytes) -> Training:
    return msgspec.msgpack.decode(record, type=Training)


class CheckedMailbox(Mailbox):
    """Counts what each peer has queued, and notices a message that was meant for another incarnation."""

    def __init__(self, monitor: InvariantChecks, process: ActorProcess) -> None:
        super().__init__()
        self._monitor, self._process = monitor, process

    def put(self, letter: Delivery) -> bool:
        envelope, mine = letter.envelope, self._process
        if envelope.incarnation not in (0, mine.incarnation):
            text = f"{envelope.tag} for incarnation {envelope.incarnation} reached {mine.incarnation} of {mine.name}"
            self._monitor.fail("incarnation", text)
        queued = 1 + sum(other.peer == letter.peer for other in self.letters)
        if queued > self._monitor.window:
            text = f"{envelope.sender} has {queued} messages queued at {mine.name}, granted {self._monitor.window}"
            self._monitor.fail("credit", text)
        return super().put(letter)
