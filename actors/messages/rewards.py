"""Rewards: scoring a finished trajectory."""

from typing import ClassVar

from bus.message import Message, Request


class Scores(Message, frozen=True):
    """One finite number per reward function, in the order of `reward.functions`."""

    scores: tuple[float, ...]


class NotScored(Message, frozen=True):
    """A failure by its name, never a reward of 0. `reason` is `not_finite`, `wrong_type`, `wrong_length`, or a PoolError's."""

    reason: str
    detail: str


class Score(Request[Scores | NotScored], frozen=True):
    """Score one trajectory. `completions` are its assistant texts, turn by turn; `columns` is a MessagePack map of keyword columns."""

    idempotent: ClassVar[bool] = True
    trajectory_id: str
    completions: tuple[str, ...]
    columns: bytes
