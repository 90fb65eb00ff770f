"""What the picker of engines by affinity asks of these."""

from typing import ClassVar

from rubato.bus.message import Message, Request


class StepsMeasured(Message, frozen=True):
    """What an engine's steps cost since it was first asked."""

    engine: str
    steps: tuple[float, ...]
    """Values of a rubato.planning.step_sums.StepSums, which only grow; empty where the engine does not observe its steps."""


class Measure(Request[StepsMeasured], frozen=True):
    """Ask an engine what its steps cost."""

    idempotent: ClassVar[bool] = True
