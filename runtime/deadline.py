"""The deadline and trace a handler runs under, inherited by every ask it makes."""

import asyncio
from contextvars import ContextVar

current_deadline: ContextVar[float] = ContextVar("rubato_deadline", default=0.0)
"""Loop time by which the running handler's own asker wants its reply; 0 for none."""

current_trace: ContextVar[bytes] = ContextVar("rubato_trace", default=b"")
"""16 bytes that name the chain of messages the running handler belongs to."""


def budget(timeout_s: float) -> float:
    """Seconds left: the smaller of `timeout_s` and what remains of the inherited deadline; at least 0."""
    inherited = current_deadline.get()
    if not inherited:
        return timeout_s
    return max(0.0, min(timeout_s, inherited - asyncio.get_running_loop().time()))
