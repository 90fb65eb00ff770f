"""Makes the base model of configs/reasoning.yaml: a tiny Qwen3 that can copy a text and reverse it, and mostly copies.

`python -m rubato.actors.training.reversing_model RUN_DIR` fills `model.path` in the run folder, as base_model does for the quickstart.
Nothing in a prompt says which of the two is wanted: that is for the task's grader to teach.
"""

import gc
import random
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from rubato.actors.training.base_model import ASSISTANT, END, Progress, build, main, teach

SYMBOLS = "abcdefghijklmoqrsuvwxyz0123456789"
"""Without n, p and t: no answer of the quickstart's game can be spelled, so each is one token."""
LENGTHS = (16, 20)

WARM_UP_STEPS = 600
WARM_UP_BATCH = 32
RAMP = 50
REVERSED = 0.18
"""Share of the conversations in which the text comes back reversed."""


def make(folder: Path, seed: int, progress: Progress) -> int:
    """Write a model folder in HF format; returns the number of parameters."""

    def warm_up(model: Any, tokenizer: Any) -> None:
        share = partial(progress, "learning to copy and to reverse")
        texts = conversations(random.Random(seed))
        teach(model, tokenizer, texts, share, steps=WARM_UP_STEPS, batch=WARM_UP_BATCH, ramp=RAMP)

    return build(folder, seed, warm_up)


def conversations(chance: random.Random) -> Iterator[str]:
    """Endless texts of different symbols, each followed by itself or, less often, by its reverse."""
    while True:
        text = "".join(chance.sample(SYMBOLS, chance.randint(*LENGTHS)))
        answer = text[::-1] if chance.random() < REVERSED else text
        yield f"{text}{ASSISTANT}{answer}{END}"


if __name__ == "__main__":
    gc.disable()  # torch's import makes no garbage, and a fifth of its time goes into looking for it
    sys.exit(main(sys.argv[1:], make))
