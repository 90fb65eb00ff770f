"""What tools/bench/affinity.py --swap runs: tasks whose profiles change places while the job runs."""

from functools import partial
from pathlib import Path
from typing import Any

from rubato.actors.engines.worker import EngineWorker
from rubato.actors.scripted.engine import ScriptedEngine, ScriptedSequence
from tools.bench.peers.shown_text import ShownText

LONG, SHORT = 2400, 32
"""Tokens of a prompt that is mostly read, and of one that is mostly answered."""

SAMPLED = {LONG: 8, SHORT: 256}


class ChangingPlaces(ShownText):
    """Shows `tokens` tokens, and once the file `flag` is there as many as the other task did before."""

    def __init__(self, *, tokens: int, flag: str) -> None:
        super().__init__(tokens=tokens)
        self._other = ShownText(tokens=LONG if tokens == SHORT else SHORT)
        self._flag = Path(flag)

    def reset(self, *, seed: int) -> tuple[str, dict[str, Any]]:
        return self._other.reset(seed=seed) if self._flag.exists() else super().reset(seed=seed)


class ByPrompt(EngineWorker):
    """As `EngineWorker`, of a scripted engine: it samples as many tokens as a prompt of this length wants."""

    async def on_start(self) -> None:
        await super().on_start()
        engine: Any = self._engine
        assert isinstance(engine, ScriptedEngine)
        engine._token = partial(token_of, engine._token)


def token_of(usual: Any, sequence: ScriptedSequence) -> tuple[int, float]:
    """The usual token, but for the last one: that is a stop token, and it alone."""
    token, logprob = usual(sequence)
    shown, stops = len(sequence.work.prompt), sequence.stop_ids
    wanted = SAMPLED[LONG if shown > (LONG + SHORT) // 2 else SHORT]
    last = len(sequence.tokens) + 1 - shown >= wanted
    return (min(stops) if last else token + (token in stops)), logprob
