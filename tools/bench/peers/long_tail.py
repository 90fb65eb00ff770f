"""What tools/bench/tail.py runs: a paced scripted engine whose responses are as long as RollPacker's law says, and a grader.

A prompt is a number, in which the engine reads how hard it is; the answer of its row is the share of responses that are worth 1.
"""

from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import yaml

from rubato.actors.engines.worker import EngineWorker
from rubato.actors.scripted.engine import ScriptedEngine, ScriptedSequence
from rubato.actors.training.base_model import make_tokenizer
from rubato.sim.rollpacker.rollout import LengthModel

SHRINK = 16
"""Responses are so many times shorter than the law's: a host of few cores samples their tokens one by one."""

LAW = Path(__file__).resolve().parents[3] / "configs/workloads/rollpacker_8k.yaml"


def law() -> LengthModel:
    """Of the lengths before they are shrunk."""
    return LengthModel.model_validate(yaml.safe_load(LAW.read_text()))


def worth(completion: str, answer: str) -> float:
    """The grader: chance alone decides, once for each text."""
    return float(Random(completion).random() < float(answer))


class LongTailEngine(EngineWorker):
    """As `EngineWorker`, of a scripted engine."""

    async def on_start(self) -> None:
        await super().on_start()
        engine: Any = self._engine
        assert isinstance(engine, ScriptedEngine)
        tokenizer = make_tokenizer()
        digits = {tokenizer.token_to_id(str(digit)): str(digit) for digit in range(10)}
        engine._token = partial(_token, engine._token, law(), digits, {})


def _token(
    usual: Any, lengths: LengthModel, digits: dict[int, str], known: dict[str, int], sequence: ScriptedSequence
) -> tuple[int, float]:
    """The usual token, but for the last one: that is a stop token, and it alone."""
    token, logprob = usual(sequence)
    if not sequence.stop_ids:
        return token, logprob
    name = sequence.work.request_id
    if name not in known:
        prompt = int("".join(digits[each] for each in sequence.work.prompt if each in digits))
        known[name] = max(1, lengths.tokens(0, prompt, sequence.draws) // SHRINK)
    last = len(sequence.tokens) + 1 - len(sequence.work.prompt) >= known[name]
    stop = min(sequence.stop_ids)
    return (stop if last else token + (token in sequence.stop_ids)), logprob
