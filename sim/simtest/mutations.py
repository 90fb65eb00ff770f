"""Removes one safeguard of the product at a time, so that the simulation can show that it would notice."""

import ast
import inspect
import sys
import textwrap
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, NamedTuple

from actors.samples.handover import TrainerDesk
from actors.samples.intake import Intake
from actors.training.trainer import Trainer
from bus.credit import Account
from runtime.blobs.blob import BlobInfo
from runtime.dispatch import Dispatcher
from runtime.store.memory_workset import MemoryWorkSet


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


MUTATIONS: dict[str, Mutation] = {
    "incarnation": Mutation(
        "the incarnation check",
        (Edit(Dispatcher, "arrived", "envelope.incarnation != self.incarnation", "False"),),
    ),
    "commit_epoch": Mutation(
        "the epoch check of COMMIT",
        (
            Edit(TrainerDesk, "commit", "self._check(request.epoch)", "pass"),
            Edit(MemoryWorkSet, "commit", "self._refuse_old(epoch)", "pass"),
        ),
        ("zombie_before_commit", "kill", "zombie", "freeze"),
    ),
    "commit_removal": Mutation(
        "COMMIT's removal from ready",
        (
            Edit(
                MemoryWorkSet,
                "_end_group",
                "items = self._groups.pop(name).items",
                "items = (self._groups[name] if step else self._groups.pop(name)).items; "
                "step and setattr(self._groups[name], 'step', 0)",
            ),
        ),
    ),
    "replay_order": Mutation(
        "the replay order: a restarted trainer begins with the newest bound step",
        (
            Edit(
                Trainer,
                "on_start",
                "self._rows.truncate(self._step)",
                "self._step = max((self._step + 1, *drawn.bound)) - 1; self._rows.truncate(self._step)",
            ),
        ),
    ),
    "replay_groups": Mutation(
        "the replay of the very groups that a step was bound to",
        (Edit(MemoryWorkSet, "claim", "if self._bound_to(step):", "if False:"),),
    ),
    "attempt": Mutation(
        "the ticket's attempt check",
        (
            Edit(Intake, "put", "ticket.attempt != member.attempt", "False"),
            Edit(Intake, "_store", "member.attempt != trajectory.ticket.attempt", "False"),
        ),
    ),
    "credit": Mutation(
        "the credit accounting",
        (Edit(Account, "take", "self.messages < 1 or self.size_bytes < cost", "False"),),
    ),
    "sweep": Mutation(
        "the sweep at hand-over",
        (
            Edit(MemoryWorkSet, "claim", "self._groups[name].score < min_score", "False"),
            Edit(Intake, "drop_old", "*self._book.ready()", ""),
        ),
    ),
    "digest": Mutation(
        "the digest check of weights",
        (Edit(BlobInfo, "check", "!= self.digest", "== ''"),),
        ("weights_corrupt", "weights_half"),
    ),
}
"""Name → mutation. The first seven of the list in docs/reliability.md, and the replay once more."""


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
        raise LookupError(
            f"{where} holds {edit.old!r} {source.count(edit.old)} times, not once: the mutation must follow it"
        )
    tree = ast.parse(source.replace(edit.old, edit.new))
    namespace: dict[str, Any] = {}
    exec(compile(tree, f"<mutated {edit.method}>", "exec"), vars(sys.modules[edit.owner.__module__]), namespace)
    return namespace[edit.method]
