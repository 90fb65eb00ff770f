"""Requests that move in virtual time: which one, in both modes, and whether its cache travels, by `rubato.planning.moves.carry`."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from rubato.planning.moves import Transfer, carry
from rubato.sim.engine_model import ModelledEngine
from rubato.sim.timeline import Timeline

PROMPT_TOKENS = 1024
"""Of the prompt whose prefill tells an engine's rate."""


class NextMove(NamedTuple):
    """`request` goes to the engine `target`."""

    request: str
    target: str


def next_move(requests: Mapping[str, Sequence[str]]) -> NextMove | None:
    """From the engine that has most requests, its newest, to the one that has fewest; None where all have as many.

    `requests` by engine, the oldest first.
    """
    names = sorted(requests)
    source = max(names, key=lambda name: len(requests[name]))
    target = min(names, key=lambda name: len(requests[name]))
    if len(requests[source]) == len(requests[target]):
        return None
    return NextMove(requests[source][-1], target)


class MovesRequests(Protocol):
    """See ModelledProxy."""

    def requests(self) -> Mapping[str, Sequence[str]]: ...
    def move(self, session: str, target: str) -> None: ...


async def keep_moving(timeline: Timeline, proxy: MovesRequests, every_s: float) -> None:
    """A move every `every_s` seconds."""
    while True:
        await timeline.sleep(every_s)
        found = next_move(proxy.requests())
        if found is not None:
            proxy.move(*found)


class ModelledCarry:
    """Whether caches travel, by the rates that engines have observed so far, as in actors/moves/departures.py. Rates are in tokens a second."""

    def __init__(self) -> None:
        self._export: dict[str, float] = {}
        """Of what left an engine, the wait for its step's boundary included."""
        self._reached: set[str] = set()
        """Engines that a cache came to."""

    def is_carried(self, source: ModelledEngine, tokens: int, *, same_weights: bool) -> bool:
        """Whether the keys and values of a request with `tokens` travel from `source`, or are computed anew elsewhere."""
        link = self._export.get(source.name, 0.0) if source.name in self._reached else 0.0
        prefill = PROMPT_TOKENS / source.model.prefill_s(PROMPT_TOKENS)
        return carry(Transfer(tokens, tokens - 1, 1.0, link, prefill, same_weights)).with_cache

    def travelled(self, source: str, target: str, tokens: int, seconds: float) -> None:
        """A cache did, `seconds` after it was ordered to."""
        self._export[source] = tokens / seconds
        self._reached.add(target)
