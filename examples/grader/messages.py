"""What is asked of the grader, and what it answers: two small frozen types."""

from typing import ClassVar

from rubato.bus.message import Message, Request


class Graded(Message, frozen=True):
    """How good the answer is, from 0 to 1."""

    score: float


class Grade(Request[Graded], frozen=True):
    """Grade `answer` to a task that wants `wanted`. Asking twice does no harm."""

    idempotent: ClassVar[bool] = True
    answer: str
    wanted: str
