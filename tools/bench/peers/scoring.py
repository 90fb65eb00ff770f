"""A reward function that takes a set time for each completion, in a worker process: what it is shown is of no consequence."""

import time
from typing import Any

EACH_S = 0.25
"""Of a worker's time."""


def slow(completions: list[str], **_: Any) -> list[float]:
    """Half of them, by their length, get a point."""
    time.sleep(EACH_S * len(completions))  # noqa: TID251 - stands for the work of a verifier, in a process of its own
    return [float(len(completion) % 2) for completion in completions]
