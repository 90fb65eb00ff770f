"""Makes the quickstart's base model: a tiny Qwen3 that knows the answer format and nothing of the game.

`python -m rubato.actors.training.base_model RUN_DIR` reads the run's config and fills `model.path` in the run folder, once.
Progress goes to standard output as JSON lines. The warm-up shows random walks on random boards: which answer is good on
which board is not in it. What was made is kept in the user's cache for later runs of this code and seed.
"""

import gc
import hashlib
import itertools
import json
import os
import platform
import random
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from rubato.runtime.config.overrides import read

ACTIONS = ("left", "down", "right", "up")
CELLS = "FHGP"
ASSISTANT, END, UNKNOWN = "<|assistant|>", "<|end|>", "<|unknown|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'assistant' %}<|assistant|>{{ message.content }}<|end|>"
    "{% else %}{{ message.content }}{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


class Text(NamedTuple):
    """What a model's text is made of: one token for each of `words`, for each character, and for each special one."""

    words: Sequence[str]
    special: Sequence[str] = ()
    template: str = CHAT_TEMPLATE


CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": True,
    "use_cache": False,
}
"""0.5 M parameters, two layers: more of them cost time per step and learned no better (measured)."""

INIT_STD = 0.15
"""Ten times the usual: attention is sharp enough from the start for a few dozen updates to move it. With 0.02 the reward stays
near 0.35, where the answer ignores the board, three times as long (measured on three seeds)."""

WARM_UP_STEPS = 50
WARM_UP_BATCH = 16
LEARNING_RATE = 1e-3

FILES = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
"""Of a model folder, in the order in which they are written: the last one marks it as whole."""
KEPT = 16
"""Newest models that stay in the user's cache, of 2 MB each."""


Progress = Callable[[str, float], None]
"""Told what is being done, and the share of it that is."""
Maker = Callable[[Path, int, Progress], int]
"""Writes a model folder from a seed; returns the number of parameters."""


def make(folder: Path, seed: int, progress: Progress, *, steps: int = WARM_UP_STEPS) -> int:
    """Write a model folder in HF format, warmed up for `steps`; returns the number of parameters. The same seed gives the same files."""

    def warm_up(model: Any, tokenizer: Any) -> None:
        _compose_rows(model.model.embed_tokens.weight, tokenizer)
        share = partial(progress, "learning the answer format from random walks")
        teach(model, tokenizer, random_walks(random.Random(seed)), share, steps=steps, batch=WARM_UP_BATCH)

    return build(folder, seed, warm_up)


def build(folder: Path, seed: int, warm_up: Callable[[Any, Any], None], text: Text | None = None) -> int:
    """Write a model folder in HF format of a model drawn from `seed` that went through `warm_up(model, tokenizer)`; returns its size."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    torch.set_num_threads(1)  # on matrices this small a second thread only waits, and on a busy machine for long
    tokenizer = make_tokenizer(text)
    ids = {token: tokenizer.token_to_id(token) for token in (ASSISTANT, END)}
    config = Qwen3Config(**CONFIG, vocab_size=tokenizer.get_vocab_size(), eos_token_id=ids[END], pad_token_id=ids[END])
    model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=INIT_STD)
    warm_up(model, tokenizer)
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ids[END], "pad_token_id": ids[END]}))
    write_tokenizer(folder, text)
    return sum(p.numel() for p in model.parameters())


def write_tokenizer(folder: Path, text: Text | None = None) -> None:
    """The tokenizer alone: all that a job needs whose engines and trainer are scripted. Written last, it marks the folder as whole."""
    folder.mkdir(parents=True, exist_ok=True)
    make_tokenizer(text).save(str(folder / "tokenizer.json"))
    special = {"eos_token": END, "pad_token": END, "unk_token": UNKNOWN}
    described = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": text.template if text else CHAT_TEMPLATE, **special}
    (folder / "tokenizer_config.json").write_text(json.dumps(described, indent=2))


def make_tokenizer(text: Text | None = None) -> Any:
    """Of `text`, or the quickstart's: there a row of the board is one token (with the line end before it, so that the first row differs),
    an answer is one, any other character is one: seven tokens a turn, where characters would take 23."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

    printable = [chr(c) for c in range(32, 127)] + ["\n"]
    rows = [line + "".join(cells) for line in ("", "\n") for cells in itertools.product(CELLS, repeat=4)]
    special = (UNKNOWN, ASSISTANT, END, *(text.special if text else ()))
    words = [*special, *(text.words if text else (*ACTIONS, *rows)), *printable]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=UNKNOWN))
    longer = "|".join(map(re.escape, text.words)) if text else rf"\n?[{CELLS}]{{4}}|{'|'.join(ACTIONS)}"
    split = Regex(rf"{longer}|.|\n")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(split, behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])
    return tokenizer


def random_walks(chance: random.Random) -> Iterator[str]:
    """Endless conversations of the right form: random boards, the player on a random walk that ignores the board."""
    while True:
        board = [chance.choice("FFFFH") for _ in range(16)]
        board[0], board[15] = "F", "G"
        at, text = 0, ""
        for _ in range(chance.randint(1, 8)):
            shown = ["P" if i == at else cell for i, cell in enumerate(board)]
            rows = "\n".join("".join(shown[i : i + 4]) for i in range(0, 16, 4))
            text += f"{rows}{ASSISTANT}{chance.choice(ACTIONS)}{END}"
            at = chance.randrange(16)
        yield text


def _compose_rows(embeddings: Any, tokenizer: Any) -> None:
    """A row's embedding (`embeddings`: vocabulary x hidden) begins as the sum of one vector per cell and place.

    What is learned on one board is then worth something on others, as with characters, but at a token per row: runs end with more
    reward than those whose embeddings have nothing in common.
    """
    import torch

    size = embeddings.shape[1]
    vectors = {(at, cell): torch.randn(size) * INIT_STD / 2 for at in range(4) for cell in CELLS}
    with torch.no_grad():
        for row in itertools.product(CELLS, repeat=4):
            for line in ("", "\n"):
                embeddings[tokenizer.token_to_id(line + "".join(row))] = sum(vectors[place] for place in enumerate(row))


def teach(
    model: Any, tokenizer: Any, texts: Iterator[str], progress: Callable[[float], None], *, steps: int, batch: int, ramp: int = 1
) -> None:
    """Next-token training on what stands between ASSISTANT and END in `texts`; the learning rate rises over `ramp` steps."""
    import torch
    from torch.nn import functional

    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    rate = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / ramp))
    assistant, end = tokenizer.token_to_id(ASSISTANT), tokenizer.token_to_id(END)
    for step in range(steps):
        encoded = [tokenizer.encode(next(texts)).ids for _ in range(batch)]
        longest = max(map(len, encoded))
        tokens = torch.tensor([t + [0] * (longest - len(t)) for t in encoded])
        shown, wanted = tokens[:, :-1], tokens[:, 1:]
        asked = (shown == assistant).cumsum(1) > (shown == end).cumsum(1)
        hidden = model.model(shown).last_hidden_state[asked]
        loss = functional.cross_entropy(model.lm_head(hidden), wanted[asked])
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        rate.step()
        progress((step + 1) / steps)


# -- the user's cache -----------------------------------------------------------------------------------------------


def cache_entry(seed: int, maker: Maker = make) -> Path:
    """Where `maker`'s model of `seed` is kept, by all that determines it: its code and this, their libraries, the kind of machine."""
    code = [Path(file).read_bytes() for file in (__file__, maker.__code__.co_filename)]
    parts = [*code, *(version(name).encode() for name in ("torch", "transformers", "tokenizers"))]
    digest = hashlib.blake2b(repr([*parts, platform.machine(), seed]).encode(), digest_size=12)
    root = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(root, "rubato", "base_models", digest.hexdigest())


def keep(entry: Path, folder: Path) -> None:
    """Keep the model in `folder` for later runs, of which several may do so at once; without room or leave for it nothing is kept."""
    partial = entry.with_name(f"{entry.name}.{os.getpid()}.partial")
    try:
        content = msgspec.msgpack.encode({name: (folder / name).read_bytes() for name in FILES})
        entry.parent.mkdir(parents=True, exist_ok=True)
        partial.write_bytes(hashlib.blake2b(content).digest() + content)
        partial.replace(entry)
        for old in sorted(entry.parent.iterdir(), key=lambda path: path.stat().st_mtime)[:-KEPT]:
            old.unlink()
    except OSError:
        with suppress(OSError):
            partial.unlink()


def take(entry: Path, folder: Path) -> bool:
    """Fill `folder` with what `entry` keeps. False where that is nothing, or damaged."""
    try:
        data = entry.read_bytes()
    except OSError:
        return False
    size = hashlib.blake2b().digest_size
    if hashlib.blake2b(data[size:]).digest() != data[:size]:
        return False
    files = msgspec.msgpack.decode(data[size:], type=dict[str, bytes])
    folder.mkdir(parents=True, exist_ok=True)
    for name in FILES:
        (folder / name).write_bytes(files[name])
    return True


def main(argv: Sequence[str], maker: Maker = make) -> int:
    """Make the model of the run in `argv[0]` by `maker`, unless it is there already."""
    folder = Path(argv[0])
    config = read(folder / "config.yaml").filled_in().tree
    target = folder / config["model"]["path"]
    if not target.resolve().is_relative_to(folder.resolve()):
        _tell(f"{target}, named by model.path", 1.0)  # outside the run folder: read, never written
    elif config.get("train", {}).get("kind") == "scripted":
        write_tokenizer(target)
        _tell("a tokenizer, and no model: the trainer is scripted", 1.0)
    elif (target / FILES[-1]).exists():
        _tell(f"{target.name}, found in the run folder; delete it for a new one", 1.0)
    elif take(entry := cache_entry(int(config["run"]["seed"]), maker), target):
        _tell(f"tiny-qwen3 as made before, from {entry.parent}", 1.0)
    else:
        count = maker(target, int(config["run"]["seed"]), _tell)
        keep(entry, target)
        _tell(f"tiny-qwen3 {count / 1e6:.1f} M parameters, made for this run", 1.0)
    return 0


def _tell(what: str, progress: float) -> None:
    print(json.dumps({"what": what, "progress": progress}), flush=True)  # noqa: T201 - the launcher reads it


if __name__ == "__main__":
    gc.disable()  # torch's import makes no garbage, and a fifth of its time goes into looking for it
    sys.exit(main(sys.argv[1:]))
