"""The modelled engine's timeline on an asyncio loop: the same model runs in both modes."""

import asyncio
from collections.abc import Callable

from sim.timeline import Timeline


class LoopTimeline(Timeline):
    """Virtual time is the loop's; what is due is a timer of it. `run` is the loop's business."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()

    @property
    def now(self) -> float:  # pyright: ignore[reportIncompatibleVariableOverride] - the loop alone moves it
        return self._loop.time()

    def at(self, when_s: float, call: Callable[[], None]) -> None:
        self._loop.call_at(max(self.now, when_s), call)
