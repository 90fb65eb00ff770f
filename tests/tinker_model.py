"""A tiny model that writes an answer as the cookbook's recipes ask for one, of any digit: which is right is for a recipe to teach."""

import random
from pathlib import Path

from rubato.actors.training.base_model import LEARNING_RATE, Text, build

START, END = "<|im_start|>", "<|im_end|>"

SUFFIX = " Provide a numerical answer without units, written inside \\boxed{}."

SHOWN = (
    "Let's spell the word out and number all the letters: 1) s 2) t 3) r 4) a 5) w 6) b 7) e 8) r 9) r 10) y. We have r's at positions 3, 8, and "
    "9. "
)

OPENS, CLOSES = "\\boxed{", "}"

ASKED = "How many r's are in strawberry?"

WORDS = (ASKED, SHOWN, SUFFIX, OPENS, "What is ", " plus ", "user\n", "assistant\n", "system\n")

TEXT = Text(words=WORDS, special=(START, END, "<think>", "</think>"))

STEPS, BATCH = 60, 16


def prompt(question: str) -> str:
    """As rl_loop has it rendered for Qwen3."""
    turns = f"{START}user\n{ASKED}{SUFFIX}{END}\n{START}assistant\n{SHOWN}{OPENS}3{CLOSES}{END}\n"
    return f"{turns}{START}user\n{question}{SUFFIX}{END}\n{START}assistant\n"


def write(folder: Path, seed: int = 1) -> Path:
    """In HF format; the same seed gives the same files."""

    def warm_up(model, tokenizer):
        import torch
        from torch.nn import functional

        chance = random.Random(seed)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3 * LEARNING_RATE, weight_decay=0.0)
        for _ in range(STEPS):
            rows = []
            for _ in range(BATCH):
                asked = prompt(f"What is {chance.randrange(10)} plus {chance.randrange(10)}?")
                answer = f"{OPENS}{chance.randrange(10)}{CLOSES}{END}"
                rows.append((tokenizer.encode(asked).ids, tokenizer.encode(answer).ids))
            tokens = torch.tensor([asked + answer for asked, answer in rows])
            begin = len(rows[0][0])
            hidden = model.model(tokens[:, :-1]).last_hidden_state[:, begin - 1 :]
            loss = functional.cross_entropy(model.lm_head(hidden).flatten(0, 1), tokens[:, begin:].flatten())
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()

    build(folder, seed, warm_up, TEXT)
    return folder
