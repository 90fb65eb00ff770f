"""Rewards: scoring a finished trajectory."""

import math
from typing import ClassVar, Literal

from bus.message import Message, Request

MOST_REWARD = 1e30
"""Training computes in float32, and statistics with squares: beyond this the weights would end as infinities."""


def flaw_of(reward: float) -> Literal["", "not_finite", "out_of_range"]:
    """Why this can't be a reward."""
    if not math.isfinite(reward):
        return "not_finite"
    return "out_of_range" if abs(reward) > MOST_REWARD else ""


class Scores(Message, frozen=True):
    """One number without a flaw per reward function, in the order of `reward.functions`."""

    scores: tuple[float, ...]


class NotScored(Message, frozen=True):
    """A failure by its name, never a reward of 0. `reason` is `not_finite`, `out_of_range`, `wrong_type`, `wrong_length`, or a PoolError's."""

    reason: str
    detail: str


class Score(Request[Scores | NotScored], frozen=True):
    """Score one trajectory. `completions` are its assistant texts, turn by turn; `columns` is a MessagePack map of keyword columns."""

    idempotent: ClassVar[bool] = True
    trajectory_id: str
    completions: tuple[str, ...]
    columns: bytes
