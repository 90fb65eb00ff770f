"""What `tools/bench/forecast.py --play` runs: a scripted engine and environments whose rollouts are as long as the curves of configs/lengths say.

A prompt is a number and a curve's name. The number says which part of the curve its responses come from, more or less: responses of one
prompt are alike, as those of real prompts are.
"""

import asyncio
import math
import re
from functools import cache, partial
from random import Random
from statistics import NormalDist
from typing import Any

from actors.engines.worker import EngineWorker
from actors.scripted.engine import ScriptedEngine, Slot
from actors.training.base_model import make_tokenizer
from sim.admission.job import distributions

SHRINK = 16
"""Responses are so many times shorter than the curves': a host of few cores samples their tokens one by one."""

ALIKE = 0.5
"""Correlation of two responses to one prompt, of their normal scores. It is ours: the papers tell none."""

AGENT_SHRINK = 4
"""And those of agentic turns so many times more."""

TURNS, STAY = 12, 0.6
"""Most turns of an agentic rollout, and the chance that another one follows."""

ENV_S = 0.02
"""Median time of an agentic environment's step; its deviation in logs is 1."""

GROWTH = 1.02
"""Of the responses to `drift`, from one version of the weights to the next."""

CURVES = {"math": "math", "code": "code", "judge": "judge", "drift": "math", "agent": "judge"}
"""Task → its curve."""

PROMPT = re.compile(rf"(\d+) ({'|'.join(CURVES)})")

NORMAL = NormalDist()


CURVE = cache(distributions)


def drawn(task: str, number: int, version: int, chance: Random) -> int:
    """Tokens of a response."""
    hard = NORMAL.inv_cdf(Random(f"{task}/{number}").uniform(1e-6, 1 - 1e-6))
    score = math.sqrt(ALIKE) * hard + math.sqrt(1 - ALIKE) * chance.gauss(0, 1)
    tokens = CURVE()[CURVES[task]].at(NORMAL.cdf(score)) / SHRINK / (AGENT_SHRINK if task == "agent" else 1)
    return max(1, round(tokens * (GROWTH**version if task == "drift" else 1.0)))


class LongTurnsEngine(EngineWorker):
    """As `EngineWorker`, of a scripted engine."""

    async def on_start(self) -> None:
        await super().on_start()
        engine: Any = self._engine
        assert isinstance(engine, ScriptedEngine)
        engine._token = partial(_token, engine, engine._token, make_tokenizer(), {})


def _token(engine: ScriptedEngine, usual: Any, tokenizer: Any, known: dict[str, int], slot: Slot) -> tuple[int, float]:
    """The usual token, but for the last one: that is a stop token, and it alone."""
    sequence = slot.sequence
    token, logprob = usual(slot)
    name = sequence.work.request_id
    if name not in known:
        found = PROMPT.search(tokenizer.decode(list(sequence.work.prompt)))
        assert found is not None
        number, task = int(found[1]), found[2]
        known[name] = drawn(task, number, engine._version, Random(f"{slot.key}/{len(sequence.work.prompt)}"))
    last = len(sequence.tokens) + 1 - len(sequence.work.prompt) >= known[name]
    stop = min(sequence.stop_ids)
    return (stop if last else token + (token in sequence.stop_ids)), logprob


async def worth(completion: str, answer: str, *, task: str, turn: int) -> tuple[float, str]:
    """The verifier. An agentic rollout's environment takes its time after each turn, and mostly asks for another one."""
    chance = Random(f"{task}/{turn}/{completion}")
    reply = ""
    if task == "agent":
        await asyncio.sleep(ENV_S * chance.lognormvariate(0, 1))
        reply = "go on" if turn < TURNS and chance.random() < STAY else ""
    return (0.0 if reply else float(chance.random() < 0.5)), reply
