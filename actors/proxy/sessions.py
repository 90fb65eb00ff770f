"""Remembers which engine holds each session's KV cache; the least recently used sessions are forgotten at the limit."""

from collections import OrderedDict


class Sessions:
    """Session → name of the engine that served its last turn. Forgetting one costs a recomputed cache, nothing else."""

    def __init__(self, limit: int) -> None:
        self._engines: OrderedDict[str, str] = OrderedDict()
        self._limit = limit

    def __len__(self) -> int:
        return len(self._engines)

    def engine_of(self, session: str) -> str | None:
        """The engine that served `session` last, if it is remembered; it may have left since."""
        return self._engines.get(session)

    def served(self, session: str, engine: str) -> None:
        """`engine` takes the session's newest turn."""
        self._engines[session] = engine
        self._engines.move_to_end(session)
        if len(self._engines) > self._limit:
            self._engines.popitem(last=False)
