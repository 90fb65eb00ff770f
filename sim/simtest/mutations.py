"""Removes one safeguard of the product at a time, so that the simulation can show that it would notice."""

import ast
import inspect
import sys
import textwrap
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, NamedTuple

from rubato.actors.gateway.forest import Forest
from rubato.actors.gateway.session import Session
from rubato.actors.moves.departures import Departures
from rubato.actors.samples.buffer import SampleBuffer
from rubato.actors.samples.groups import Groups
from rubato.actors.samples.journal import Journal
from rubato.actors.training.trainer import Trainer
from rubato.bus.link import Account
from rubato.runtime.blobs.blob import BlobInfo
from rubato.runtime.dispatch import Dispatcher
from rubato.runtime.memory import MemoryStore


class Edit(NamedTuple):
    """`old` stands exactly once in the method's source, and is replaced by `new`."""

    owner: type
    method: str
    old: str
    new: str


class Mutation(NamedTuple):
    """What is removed, in words, and how; `faults` are drawn for it where the default draw rarely needs the safeguard."""

    what: str
    edits: tuple[Edit, ...]
    faults: tuple[str, ...] = ()
    sessions: bool = False
    """Only seeds with agents from outside need it."""


MUTATIONS: dict[str, Mutation] = {
    "incarnation": Mutation("the incarnation check", (Edit(Dispatcher, "arrived", "envelope.incarnation != self.incarnation", "False"),)),
    "term": Mutation(
        "the term check of a trainer's claims and commits",
        (Edit(Groups, "check_term", "term < self.training.term", "False"),),
        ("zombie_before_commit", "kill", "zombie", "freeze"),
    ),
    "term_durable": Mutation(
        "the write that the answer to a drawn term waits for", (Edit(SampleBuffer, "draw_term", "await self._journal.sync()", "pass"),)
    ),
    "answer": Mutation(
        "the write that the answer to a put waits for", (Edit(SampleBuffer, "put", "await self._journal.sync()", "await asyncio.sleep(0)"),)
    ),
    "turn": Mutation(
        "the number of a write: a Store that forgot goes unnoticed",
        (Edit(MemoryStore, "_passes", "stored != (turn.after or (fence.token, turn.number - 1))", "False"),),
        ("store_loss",),
    ),
    "fence": Mutation(
        "the fence: to a buffer that was replaced the Store seems to have forgotten, and it writes everything anew",
        (Edit(MemoryStore, "_passes", "fence.token < stored[0]", "False"),),
        ("zombie",),
    ),
    "in_office": Mutation(
        "the rule that a buffer whose fence was lost begins again with what one before it answered",
        (Edit(Journal, "_writes_all", "found[1] > self._taken_over.get(found[0], 0)", "False"),),
        ("zombie_fence_lost",),
    ),
    "index": Mutation(
        "the index of ends: those that the Store forgot are appended once more",
        (Edit(Journal, "_writes_all", "training.ended - len(self._ends) + 1", "stored.ended + 1"),),
        ("store_loss",),
    ),
    "gap": Mutation(
        "the rule that a step is claimed only behind one that has its groups",
        (
            Edit(Groups, "plan", "step > self.last_bound + 1", "False"),
            Edit(SampleBuffer, "_cover", "step is None or not self._groups.covers(step)", "False"),
        ),
        ("store_loss_kill", "store_loss"),
    ),
    "checkpoint": Mutation(
        "what a starting buffer learns from the newest checkpoint",
        (Edit(SampleBuffer, "_cover", "step is None or not self._groups.covers(step)", "False"),),
        ("store_loss_kill", "store_loss"),
    ),
    "fall_back": Mutation(
        "the way back of trained steps when a trainer begins with an older checkpoint",
        (Edit(Groups, "take_over", "for group in list(self.trained.values()):", "self.steps.clear()\n    for group in ():"),),
        ("crash_after_save", "crash_before_save", "kill"),
    ),
    "order": Mutation(
        "the order of a step's groups after a restart",
        (Edit(Groups, "restore", "bound.sort(key=lambda group: (group.version(0), group.id))", "bound.reverse()"),),
        ("kill", "resume"),
    ),
    "replay_order": Mutation(
        "the replay order: a restarted trainer begins with the newest bound step",
        (
            Edit(
                Trainer,
                "on_start",
                "await self.on_disk(self._checkpoints, checkpoints.take_over, self._checkpoints, self.term)",
                "await self.on_disk(self._checkpoints, checkpoints.take_over, self._checkpoints, self.term); self._step = max((self._step + 1, *drawn.bound)) - 1",
            ),
        ),
    ),
    "replay_groups": Mutation(
        "the replay of the very groups that a step was bound to",
        (Edit(SampleBuffer, "_claim", "request.step not in groups.steps", "samples is None"),),
        ("crash_after_save", "crash_before_save", "kill"),
    ),
    "attempt": Mutation(
        "the ticket's attempt check", (Edit(Groups, "settled_fate", "group.members[index].attempt != ticket.attempt", "False"),)
    ),
    "credit": Mutation("the credit accounting", (Edit(Account, "take", "self.messages < 1 or self.size_bytes < cost", "False"),)),
    "sweep": Mutation(
        "the age check at hand-over",
        (
            Edit(Groups, "supply", "alpha=self.alpha", "alpha=self.alpha + 1"),
            Edit(Groups, "drop_old", "group.version_scored(self.base) < oldest", "False"),
            Edit(Groups, "score", "is_stale(outcome.version_first, self.base, self.alpha)", "False"),
        ),
    ),
    "tally": Mutation(
        "the count of tokens that only a checkpoint still knows of",
        (Edit(Groups, "_bring_back", "self._tell(group, max(0, member.outcome.tokens) - known)", "pass"),),
        ("store_loss_kill", "store_loss"),
    ),
    "move": Mutation(
        "the number of a move: any target that comes for a request that is parked gets it",
        (Edit(Departures, "take", "parked.number != request.number", "False"),),
        ("moves",),
    ),
    "digest": Mutation(
        "the digest check of weights", (Edit(BlobInfo, "check", "!= self.digest", "== ''"),), ("weights_corrupt", "weights_half")
    ),
    "branch": Mutation(
        "the branch that begins where a session's history goes on from a turn which something followed already",
        (Edit(Forest, "opened", "len(before.transcript) == before.end and not alone", "not alone"),),
        sessions=True,
    ),
    "under_way": Mutation(
        "the end of a session's turns with it: they go on while it is scored",
        (Edit(Session, "_end", "limit.cut()", "pass"), Edit(Session, "drive", "await self._quiet.wait()", "pass")),
        sessions=True,
    ),
    "session_name": Mutation(
        "the session's name in those of its requests",
        (Edit(Session, "begin", 'f".{public_name(self.id)}"', '""'),),
        ("store_loss_kill", "store_loss"),
        sessions=True,
    ),
    "idle": Mutation(
        "the end of a session whose agent is gone", (Edit(Session, "_until_idle", "timeout=left_s", "timeout=None"),), sessions=True
    ),
}
"""Name → mutation; the list in docs/reliability.md says how each is noticed."""


@contextmanager
def applied(name: str) -> Generator[None]:
    """Run the block with the safeguard removed. Raises LookupError when the code to edit is no longer there."""
    edits = MUTATIONS[name].edits if name else ()
    before = [(edit, edit.owner.__dict__[edit.method]) for edit in edits]
    try:
        for edit in edits:
            setattr(edit.owner, edit.method, edited(edit))
        yield
    finally:
        for edit, method in before:
            setattr(edit.owner, edit.method, method)


def edited(edit: Edit) -> Any:
    """The method, compiled again from its edited source."""
    method = edit.owner.__dict__[edit.method]
    source = textwrap.dedent(inspect.getsource(method))
    if source.count(edit.old) != 1:
        where = f"{edit.owner.__name__}.{edit.method}"
        raise LookupError(f"{where} holds {edit.old!r} {source.count(edit.old)} times, not once: the mutation must follow it")
    tree = ast.parse(source.replace(edit.old, edit.new))
    namespace: dict[str, Any] = {}
    exec(compile(tree, f"<mutated {edit.method}>", "exec"), vars(sys.modules[edit.owner.__module__]), namespace)
    return namespace[edit.method]
