"""An environment of one turn that shows a text of a given length, and takes any answer."""

import random
from typing import Any

from rubato.actors.training.reversing_model import SYMBOLS


class ShownText:
    """`tokens` symbols, each of them one token of the built-in tokenizer. Half of the answers are worth 1, so that groups have a spread."""

    def __init__(self, *, tokens: int) -> None:
        self._tokens = tokens

    def reset(self, *, seed: int) -> tuple[str, dict[str, Any]]:
        return "".join(random.Random(seed).choices(SYMBOLS, k=self._tokens)), {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        return "", float(len(action) % 2), True, False, {}

    def close(self) -> None:
        pass
