"""Models of Qwen3's shapes with random weights, a tokenizer for them, and word problems for them to read."""

import json
import random
import re
from collections.abc import Iterator
from math import log10
from pathlib import Path
from typing import Any

VOCAB = 151_936
TINY: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 32, "vocab_size": 512,
}  # fmt: skip
QWEN3: dict[str, Any] = {
    "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": VOCAB,
}  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {
    "tiny": TINY,
    "0.6B": {**QWEN3, "hidden_size": 1024, "intermediate_size": 3072},
    "1.7B": {**QWEN3, "hidden_size": 2048, "intermediate_size": 6144},
}
"""Qwen3's published ones, with tied embeddings; tiny is for trying out."""

SHARPER = 5
"""Embeddings times this, where a model is to be sharp: with the usual ones every token is about as probable as any other."""

END, ASSISTANT = "<|end|>", "<|assistant|>"
TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'assistant' %}<|assistant|>{{ message.content }}<|end|>"
    "{% else %}{{ message.content }}{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def make_model(folder: Path, shape: str, device: str, *, sharp: bool = False) -> int:
    """Random bf16 weights in HF format; returns the number of parameters."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen3Config
    from transformers.utils import logging

    logging.disable_progress_bar()
    config = Qwen3Config(
        **SHAPES[shape],
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        max_position_embeddings=4096,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    if sharp:
        with torch.no_grad():
            model.get_input_embeddings().weight.mul_(SHARPER)
    model.save_pretrained(folder)
    return sum(p.numel() for p in model.parameters())


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """A character is a token, and so is a number behind a space; there are as many of those as the vocabulary has room for."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

    words = [END, ASSISTANT, *(chr(c) for c in range(32, 127)), "\n"]
    words += [f" {number}" for number in range(vocab_size - len(words))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=END))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r" \d{1,5}|.|\n"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in (END, ASSISTANT)])
    tokenizer.save(str(folder / "tokenizer.json"))
    told = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "pad_token": END, "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(told, indent=2))


def word_problems(num: int, seed: int) -> Iterator[dict[str, str]]:
    """Rows in GSM8K's form: a question of two steps, and an answer that ends with the number."""
    chance = random.Random(seed)
    for _ in range(num):
        name, thing = (chance.choice(("Ada", "Ben", "Cleo", "Dan")), chance.choice(("apples", "books", "coins", "shells")))
        had, bags, each, gave = (chance.randint(2, 40) for _ in range(4))
        left = had + bags * each - min(gave, had)
        question = (
            f"{name} has {had} {thing} and buys {bags} bags with {each} {thing} in each. {name} gives {min(gave, had)} "
            f"{thing} to a friend. How many {thing} does {name} have now?"
        )
        steps = f"{bags} bags hold {bags * each} {thing}, so there are {had + bags * each}, and {left} are left."
        yield {"question": question, "answer": f"{steps}\n#### {left}"}


def near(completion: str, answer: str) -> float:
    """Grader: 1 where the last numbers of both are the same, and less the more orders of magnitude lie between them.

    A model of random weights never hits one; by this its groups have spread all the same, so that every batch is trained on.
    """
    wanted, given = (re.findall(r"\d+", text)[-1:] for text in (answer, completion))
    if not (wanted and given):
        return 0.0
    return 1 / (1 + abs(log10((int(given[0][:12]) + 1) / (int(wanted[0]) + 1))))
