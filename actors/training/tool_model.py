"""Makes the base model of configs/agent.yaml: a tiny Qwen3 that calls a tool and reads what it gives, and counts from the wrong end.

`python -m rubato.actors.training.tool_model RUN_DIR` fills `model.path` in the run folder, as base_model does for the quickstart. Its tokens
are those of the task: a call's frame is two, so that a turn of the agent is four tokens long. Which drawer is the first one, mostly the
eighth in what it was shown, is for the task's reward to teach.
"""

import gc
import random
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from rubato.actors.training.base_model import ASSISTANT, END, Progress, Text, build, main, teach

ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth")
WORDS = ("apple", "brush", "candle", "drum", "egg", "flute", "glove", "hammer", "iron", "jar", "key", "lamp", "map", "nail", "oar", "pen")
TOOL = "<|tool|>"
CALL, CALLED = '<tool_call>\n{"name": "open_drawer", "arguments": {"number": ', "}}\n</tool_call>"
NOTE = "see "

CHAT_TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool.function.name }}{% endfor %}"
    "{% for message in messages %}{% if message.role == 'assistant' %}<|assistant|>{{ message.content or '' }}"
    '{% for call in message.tool_calls or [] %}<tool_call>\n{"name": "{{ call.function.name }}", "arguments": '
    "{{ call.function.arguments | tojson }}}\n</tool_call>{% endfor %}<|end|>"
    "{% elif message.role == 'tool' %}<|tool|>{{ message.content }}{% else %}{{ message.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

TEXT = Text(words=("open_drawer", CALL, CALLED, NOTE, *ORDINALS, *WORDS), special=(TOOL,), template=CHAT_TEMPLATE)

WARM_UP_STEPS = 400
WARM_UP_BATCH = 32
RAMP = 20
RIGHT, MIRRORED = 0.25, 0.6
"""Shares of the calls that open the drawer that was named, and the one of that number from the other end; the others open any."""


def make(folder: Path, seed: int, progress: Progress) -> int:
    """Write a model folder in HF format; returns the number of parameters."""

    def warm_up(model: Any, tokenizer: Any) -> None:
        share = partial(progress, "learning to call a tool")
        teach(model, tokenizer, conversations(random.Random(seed)), share, steps=WARM_UP_STEPS, batch=WARM_UP_BATCH, ramp=RAMP)

    return build(folder, seed, warm_up, TEXT)


def conversations(chance: random.Random) -> Iterator[str]:
    """Endless conversations of the right form, as the template has them: each note is followed, each word is the answer."""
    while True:
        named = chance.randrange(len(ORDINALS))
        text = "open_drawer" + ORDINALS[named]
        while True:
            text += f"{ASSISTANT}{CALL}{_opened(chance, named) + 1}{CALLED}{END}{TOOL}"
            if chance.random() < 0.5:
                break
            named = chance.randrange(len(ORDINALS))
            text += NOTE + ORDINALS[named]
        word = chance.choice(WORDS)
        yield f"{text}{word}{ASSISTANT}{word}{END}"


def _opened(chance: random.Random, named: int) -> int:
    drawn = chance.random()
    if drawn < RIGHT:
        return named
    return len(ORDINALS) - 1 - named if drawn < RIGHT + MIRRORED else chance.randrange(len(ORDINALS))


if __name__ == "__main__":
    gc.disable()  # torch's import makes no garbage, and a fifth of its time goes into looking for it
    sys.exit(main(sys.argv[1:], make))
