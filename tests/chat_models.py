"""Model folders with tokenizers of each kind, as small as they come: only the text matters."""

import json
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

SPECIAL = ("<|im_start|>", "<|im_end|>", "<|tool_call|>", "<|endoftext|>", "<bos>", "<pad>")

MARKS = ("<think>", "</think>", "<｜User｜>", "<｜Assistant｜>")
"""Added, and not special: as DeepSeek's tokenizers have them."""

DEEPSEEK = (
    "{% for m in messages %}{% if m.role == 'user' %}<｜User｜>{{ m.content }}{% elif m.role == 'assistant' %}"
    "<｜Assistant｜>{{ m.content.split('</think>')[-1] }}<|endoftext|>{% else %}{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<｜Assistant｜><think>\n{% endif %}"
)


def chat_model(folder, *, template=CHATML, kind="bytes", special=SPECIAL, bos=False, **settings):
    """A folder whose tokenizer knows bytes (`bytes`, `lower`: of lower case), or pieces with a space before them (`metaspace`, `llama`)."""
    made = {"bytes": _bytes, "lower": _lower, "metaspace": _metaspace, "llama": _llama}[kind]()
    normalized = kind == "lower"
    made.add_special_tokens([AddedToken(mark, special=True, normalized=normalized) for mark in special])
    made.add_tokens([AddedToken(mark, special=False, normalized=normalized) for mark in (*MARKS, "    ", "widget")])
    if bos:
        made.post_processor = processors.TemplateProcessing(
            single="<bos> $A", pair="<bos> $A $B", special_tokens=[("<bos>", made.token_to_id("<bos>"))]
        )
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    described = {"chat_template": template, "eos_token": "<|im_end|>", "pad_token": "<pad>", "bos_token": "<bos>"}
    described = {key: value for key, value in (described | settings).items() if value is not None}
    (folder / "tokenizer_config.json").write_text(json.dumps(described))
    return folder


def _bytes():
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return made


def _lower():
    made = _bytes()
    made.normalizer = normalizers.Lowercase()
    return made


def _pieces():
    vocab = {"<unk>": 0, **{f"<0x{byte:02X}>": byte + 1 for byte in range(256)}}
    letters = [*map(chr, range(33, 127)), "▁"]
    vocab |= {letter: len(vocab) + i for i, letter in enumerate(letters)}
    merges = [("▁", letter) for letter in letters[:-1]]
    vocab |= {"".join(pair): len(vocab) + i for i, pair in enumerate(merges)}
    return models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)


def _metaspace():
    made = Tokenizer(_pieces())
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    return made


def _llama():
    made = Tokenizer(_pieces())
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(Regex(" "), "▁")])
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    return made
