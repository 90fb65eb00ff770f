"""Jobs that share pools: what the actors of one job tell each other of its phases."""

from typing import ClassVar

from bus.message import Ack, Request


class Generating(Request[Ack], frozen=True):
    """Environment manager → proxies: so many rollouts of mine are between their first and their last turn."""

    idempotent: ClassVar[bool] = True
    manager: str
    num: int
