"""Held-out evaluation: a round of tasks run once each, kept in memory, since it can be run again."""

from actors.messages.samples import EvalResult
from actors.samples.book import Book
from actors.samples.groups import Group, Member

PREFIX = "eval-"
"""Of the group ids of rounds; other groups are numbered."""

ROUNDS_KEPT = 8
"""Results kept for an asker that lost its reply."""


def open_round(book: Book, key: str, num: int, now: float) -> Group:
    """The round `key`, begun now where it is new: tasks 0 … num - 1, under the present weight version or newer."""
    name = f"{PREFIX}{key}"
    if name not in book.rounds:
        complete = [old for old, group in book.rounds.items() if group.complete]
        for old in complete[: max(0, len(complete) + 1 - ROUNDS_KEPT)]:
            book.remove(old)
        members = [Member() for _ in range(num)]
        book.add(Group(name, 0, members, purpose="eval", begun=book.version), now)
    return book.rounds[name]


def is_round(group: str) -> bool:
    return group.startswith(PREFIX)


def result(group: Group) -> EvalResult:
    """The mean over the tasks that were scored (0 of none), and how many were not."""
    rewards = [member.reward for member in group.members if member.state == "scored"]
    mean = sum(rewards) / len(rewards) if rewards else 0.0
    return EvalResult(version=group.begun, reward=mean, num=len(rewards), failed=len(group.members) - len(rewards))
