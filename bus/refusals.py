"""What was turned away at an endpoint: counted by reason, with the newest case of each in words.

A flood costs one number per reason, however long it lasts: sentences are kept one per reason and read once per beat.
"""

from typing import NamedTuple


class News(NamedTuple):
    """One reason that struck since the last look: how often in all, and its newest case."""

    reason: str
    total: int
    sentence: str


class Refusals:
    """Reasons are `key`, `handshake`, `full`, `run`, `protocol`, `schema`, `greeting`, `frame` and `slow`."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        self._news: dict[str, str] = {}

    def add(self, reason: str, sentence: str) -> None:
        self.counts[reason] = self.counts.get(reason, 0) + 1
        self._news[reason] = sentence

    def news(self) -> list[News]:
        """What happened since this was last called."""
        news, self._news = self._news, {}
        return [News(reason, self.counts[reason], sentence) for reason, sentence in news.items()]
