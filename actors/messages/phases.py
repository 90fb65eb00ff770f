"""What actors tell the fabric of the job's phases."""

from typing import Literal

from rubato.bus.message import Message

Phase = Literal["rollout", "train_step", "weight_sync"]


class PhaseIntent(Message, frozen=True):
    """The job is about to enter `phase` (or is in it, when `in_s` is 0); `traffic` is bytes between named actors."""

    phase: Phase
    number: int
    """Of the phase: its step or version. With -1 the phase neither begins nor comes: only its traffic is told."""
    in_s: float
    traffic: tuple[tuple[str, str, int], ...] = ()
