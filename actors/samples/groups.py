"""A group of rollouts of one task: what became of each member, and what becomes of the group once all have an outcome."""

from typing import Literal

import msgspec

from actors.messages.samples import Purpose, Ticket
from actors.samples.sample import Note, seed_of, trajectory_id

State = Literal["pending", "running", "putting", "scored", "failed"]
"""`putting` is written before the sample itself: after a crash the WorkSet tells whether it arrived."""

MIN_SCORED = 2
"""A single reward has no advantage over anything."""


class Member(msgspec.Struct, array_like=True):
    """One rollout of a group, over all its attempts."""

    state: State = "pending"
    attempt: int = 0
    """Tickets issued so far; the newest alone counts."""
    tries: int = 0
    """Attempts that came to nothing."""
    version: int = 0
    """Weight version when the newest ticket was issued."""
    holder: str = ""
    incarnation: int = 0
    version_first: int = 0
    reward: float = 0.0
    fate: str = ""
    reason: str = ""

    @property
    def settled(self) -> bool:
        return self.state in ("scored", "failed")


class Group(msgspec.Struct, array_like=True):
    """Members of one task. `fate` is empty while members run; `sealed` means claimable; `step` is what it is bound to."""

    id: str
    task: int
    members: list[Member]
    purpose: Purpose = "train"
    begun: int = 0
    """Weight version when it was opened."""
    fate: str = ""
    sealed: bool = False
    step: int = 0

    @property
    def complete(self) -> bool:
        return all(member.settled for member in self.members)

    @property
    def trainable(self) -> bool:
        """Its fate is one that the trainer decides."""
        return self.fate in ("trained", "zero_spread")

    @property
    def num_scored(self) -> int:
        return sum(member.state == "scored" for member in self.members)

    @property
    def num_settled(self) -> int:
        return sum(member.settled for member in self.members)

    def verdict(self) -> str:
        """The fate of a complete group."""
        rewards = [member.reward for member in self.members if member.state == "scored"]
        if len(rewards) < MIN_SCORED:
            return "group_too_small"
        return "zero_spread" if min(rewards) == max(rewards) else "trained"

    def fate_of(self, member: Member) -> str:
        """What the holder of a member is told: empty while its sample may train."""
        return member.fate or ("" if self.trainable else self.fate)

    def version(self, now: int) -> int:
        """The oldest version that a first token of the group has or may still get, at weight version `now`."""
        return min((_version(member, now) for member in self.members if member.state != "failed"), default=now)

    def version_known(self, now: int) -> int:
        """As `version`, but of the tokens that are there already."""
        known = (m.version_first for m in self.members if m.state in ("putting", "scored"))
        return min(known, default=now)

    def note(self, member: Member) -> bytes:
        """What the ledger says of a member that ends without a stored sample."""
        came = member.state in ("putting", "scored")
        note = Note(
            attempt=member.attempt,
            task=self.task,
            version_first=member.version_first if came else -1,
            reward=member.reward if came else None,
            reason=member.reason,
        )
        return msgspec.msgpack.encode(note)

    def ticket(self, index: int, *, run_seed: int, alpha: int) -> Ticket:
        """The newest ticket of member `index`. Held-out rollouts have no staleness bound."""
        member = self.members[index]
        return Ticket(
            trajectory_id=trajectory_id(self.id, index),
            group_id=self.id,
            attempt=member.attempt,
            task=self.task if self.purpose == "train" else index,
            seed=seed_of(self.purpose, run_seed, self.task if self.purpose == "train" else index),
            version=member.version,
            alpha=alpha if self.purpose == "train" else -1,
            purpose=self.purpose,
        )


def _version(member: Member, now: int) -> int:
    match member.state:
        case "pending":
            return now
        case "running":
            return member.version
        case _:
            return member.version_first
