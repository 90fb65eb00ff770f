"""The invariants of a run, checked as things happen and after every step."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from actors.messages.samples import Trajectory
from actors.samples.sample import Note
from bus.credit import Account
from bus.transport import Delivery
from runtime.dispatch import Mailbox
from runtime.store.workset import Claimed, Ended
from sim.simtest.process import ActorProcess

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
    bounds: dict[int, int] = field(default_factory=dict)
    """Step → α at its first hand-over."""
    trained_in: dict[str, int] = field(default_factory=dict)
    committed: int = 0
    epoch: int = 0
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
        self.epoch_holders: dict[int, int] = {}
        self.num_losses = 0

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

    def applied(self, method: str, args: tuple[Any, ...], value: Any) -> None:
        """A call took effect in the store."""
        match method:
            case "samples.claim":
                self._claimed(args[2], args[3], value)
            case "samples.commit":
                self._committed(args[0], args[1])
            case "samples.put":
                self.timeline.put.add(args[0].id)
            case "samples.new_epoch":
                self.timeline.epoch = max(self.timeline.epoch, value)
            case _:
                pass

    def _claimed(self, step: int, epoch: int, claimed: Claimed) -> None:
        self.timeline.epoch = max(self.timeline.epoch, epoch)
        ids = tuple(item.id for _, items in claimed.groups for item in items)
        if not ids:
            return
        before = self.timeline.claims.setdefault(step, ids)
        self.timeline.bounds.setdefault(step, self.alpha)
        if before != ids:
            self.fail("replay", f"step {step} was bound to {before} and is handed out as {ids}")

    def _committed(self, step: int, epoch: int) -> None:
        line = self.timeline
        if epoch < line.epoch:
            self.fail(
                "one committer per epoch", f"step {step} committed under epoch {epoch}, {line.epoch} is the newest"
            )
        line.epoch = max(line.epoch, epoch)
        if step <= line.committed:
            return
        if step != line.committed + 1:
            self.fail("gapless steps", f"step {step} committed after {line.committed}")
        line.committed = step
        for name in line.claims.get(step, ()):
            other = line.trained_in.setdefault(name, step)
            if other != step:
                self.fail("one step per sample", f"{name} is committed in steps {other} and {step}")

    # -- actors -------------------------------------------------------------------------------------------------

    def drew(self, process: ActorProcess, epoch: int) -> None:
        """A trainer was given `epoch`."""
        holder = self.epoch_holders.setdefault(epoch, process.incarnation)
        if holder != process.incarnation and not self.num_losses:
            self.fail(
                "one committer per epoch", f"epoch {epoch} was given to incarnations {holder} and {process.incarnation}"
            )

    def stored(self, trajectory: Trajectory, fate: str) -> None:
        """The buffer acknowledged a Put."""
        ticket = trajectory.ticket
        if ticket.purpose == "train" and fate != "superseded":
            known = self.timeline.acknowledged.get(ticket.trajectory_id)
            if fate == "" and known not in (None, ticket.attempt) and ticket.trajectory_id not in self.lost_by_store:
                self.fail(
                    "one attempt per sample",
                    f"{ticket.trajectory_id}: attempts {known} and {ticket.attempt} were both taken",
                )
            if fate == "":
                self.timeline.acknowledged[ticket.trajectory_id] = ticket.attempt

    def commit_answered(self, step: int, epoch: int, newest: int) -> None:
        """The buffer told a trainer of `epoch` that its checkpoint counts; `newest` is the epoch it knew of as it was asked."""
        if epoch < newest:
            self.fail(
                "one committer per epoch",
                f"COMMIT of step {step} under epoch {epoch} was answered, {newest} is the newest",
            )

    def trained(self, step: int, groups: list[list[Trajectory]], history: list[list[str]]) -> None:
        """The trainer updates its weights; `history` is what they were made of before."""
        if step != len(history) + 1:
            self.fail("gapless steps", f"step {step} is trained on weights of {len(history)} steps")
        before = {name: at for at, ids in enumerate(history, 1) for name in ids}
        seen: set[str] = set()
        alpha = self.timeline.bounds.get(step, self.alpha)
        for trajectory in (t for group in groups for t in group):
            name, age = trajectory.ticket.trajectory_id, step - 1 - trajectory.version_first
            if name in before or name in seen:
                self.fail("one step per sample", f"{name} is trained in steps {before.get(name, step)} and {step}")
            seen.add(name)
            if age > alpha:
                self.fail("age", f"{name} has age {age} in step {step}; α is {alpha}")
            if trajectory.version_first < trajectory.ticket.version:
                self.fail(
                    "age",
                    f"{name} begins with version {trajectory.version_first}, its ticket says {trajectory.ticket.version}",
                )

    # -- processes ----------------------------------------------------------------------------------------------

    def check(self, processes: Sequence[ActorProcess], now: float) -> None:
        """After every step: asks end, credit is kept."""
        for process in processes:
            kernel = process.kernel
            if kernel is None or not process.alive or process.frozen or process.slowness_s or process.held:
                continue
            courier: Any = kernel._courier  # pyright: ignore[reportPrivateUsage]
            for pending in courier._pending.values():
                if pending.deadline + ASK_SLACK_S < now and process.thawed_at + ASK_SLACK_S < now:
                    what = type(pending.request).__name__
                    self.fail(
                        "every ask ends", f"{process.name} still waits for {what}, due at {pending.deadline:.3f} s"
                    )
            for (address, _), route in courier._routes.items():
                self._check_account(process, address, route.account)

    def _check_account(self, process: ActorProcess, address: str, account: Account) -> None:
        if not (0 <= account.messages <= self.window and account.size_bytes >= 0):
            self.fail(
                "credit", f"{process.name} has {account.messages} messages of credit at {address}, of {self.window}"
            )

    # -- the end ------------------------------------------------------------------------------------------------

    def ended(self, entries: Sequence[Ended], lines: Sequence[dict[str, Any]]) -> None:
        """The whole log of ends, and what samples.jsonl says of it."""
        if [entry.index for entry in entries] != list(range(1, len(entries) + 1)):
            self.fail("ledger", "the log of ends has gaps")
        told = [(line["trajectory_id"], line["fate"], line["step"] or 0) for line in lines]
        happened = [(entry.id, entry.fate, entry.step) for entry in entries]
        if told != happened:
            first = next(
                (i for i, (a, b) in enumerate(zip(told, happened, strict=False)) if a != b),
                min(len(told), len(happened)),
            )
            self.fail(
                "ledger",
                f"samples.jsonl has {len(told)} lines for {len(happened)} ends; the first to differ is line {first + 1}",
            )
        fates: dict[str, Ended] = {}
        for entry in entries:
            if entry.id in fates:
                self.fail("one fate per sample", f"{entry.id} ended as {fates[entry.id].fate} and {entry.fate}")
            fates[entry.id] = entry
        for name, attempt in self.timeline.acknowledged.items():
            self._check_kept(name, attempt, fates.get(name))

    def _check_kept(self, name: str, attempt: int, entry: Ended | None) -> None:
        if entry is None:
            self.fail("no acknowledged sample is lost", f"{name} was acknowledged and has no fate")
            return
        noted = msgspec.msgpack.decode(entry.note, type=Note) if entry.note else None
        if name not in self.lost_by_store and (entry.fate == "lost" or noted is None or noted.attempt != attempt):
            was = f"attempt {noted.attempt}" if noted else "no note"
            self.fail(
                "no acknowledged sample is lost",
                f"{name}: attempt {attempt} was acknowledged; it ended {entry.fate} with {was}",
            )


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
