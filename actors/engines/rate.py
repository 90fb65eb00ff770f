"""Tokens per second over the last few seconds."""

from collections import deque

WINDOW_S = 5.0
"""Long enough to cover several steps of a slow engine, short enough that routing sees it stall."""


class Rate:
    """A sliding count; times are loop times."""

    def __init__(self) -> None:
        self._marks: deque[tuple[float, int]] = deque()
        self.total = 0

    def add(self, now: float, num: int) -> None:
        """`num` more tokens, at loop time `now`."""
        if not self._marks or now - self._marks[-1][0] > WINDOW_S / 20:
            self._marks.append((now, self.total))
        self.total += num
        self._trim(now)

    def per_second(self, now: float) -> float:
        """Tokens per second over the window that ends `now`; 0 when nothing came in it."""
        self._trim(now)
        if not self._marks:
            return 0.0
        since, before = self._marks[0]
        return (self.total - before) / max(now - since, WINDOW_S / 20)

    def _trim(self, now: float) -> None:
        while self._marks and self._marks[0][0] < now - WINDOW_S:
            self._marks.popleft()
