"""Whether a model folder is whole, and its parts agree: looked at before anything is started, by the process that starts it alone."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from rubato.actors.checkpoints.model_folder import (
    ADAPTER_CONFIG,
    EMBED,
    HEAD,
    LARGEST_BESIDE,
    StoredTensor,
    read_description,
    read_tensors,
    text_part,
)
from rubato.runtime.errors import ConfigError

NEEDED = ("config.json", "*.safetensors", "tokenizer.json")

UNTIED = ("llama", "mistral", "qwen2", "qwen3")
"""Families whose models have a head of their own where config.json does not say."""


def check_model_folder(folder: Path, *, key: str = "model.path") -> None:
    """Raises ConfigError, one sentence, for a folder that holds no whole model, or one whose parts contradict each other; `key` of the
    config names it. Blocks, reads headers alone, and a head only where the folder has two."""
    if not os.path.isdir(folder):  # unlike Path.is_dir, it takes a name too long for an answer
        raise ConfigError(f"model folder {folder} does not exist. Set {key} to a folder in HF format.")
    if (folder / ADAPTER_CONFIG).exists():
        raise ConfigError(
            f"model folder {folder} holds an adapter ({ADAPTER_CONFIG}): merge it into its base model with "
            f"`rubato export {folder} --merged OUT`, and set {key} to OUT; or set {key} to that base, and train.lora.start to this folder."
        )
    missing = [pattern for pattern in NEEDED if not any(folder.glob(pattern))]
    if missing:
        what = " and no ".join(missing)
        others = (path for path in sorted(folder.iterdir()) if path.suffix in (".bin", ".pt", ".pth", ".gguf"))
        for other in [*others][:1] if "*.safetensors" in missing else ():
            how = ", gguf_file" if other.suffix == ".gguf" else ""
            what += f" ({other.name} is not read: load it with transformers{how}, and save_pretrained writes the other form)"
        raise ConfigError(f"model folder {folder} has no {what}. Set {key} to a folder in HF format.")
    try:
        raw, tensors = read_description(folder), read_tensors(folder)
    except ValueError as error:
        raise ConfigError(f"{error}.") from None
    if any(parts.get("quantization_config") for parts in (raw, text_part(raw))):
        raise ConfigError(
            f"model folder {folder} holds quantised weights (quantization_config in config.json), which can't be trained: "
            f"set {key} to the folder that they were made from."
        )
    _check_head(folder, raw, tensors)
    _check_tokens(folder, raw, tensors)


def _check_head(folder: Path, raw: Mapping[str, Any], tensors: Mapping[str, StoredTensor]) -> None:
    """Only of models that name their parts as Llama does."""
    tied = raw.get("tie_word_embeddings", False if raw.get("model_type") in UNTIED else None)
    if EMBED not in tensors or tied is None:
        return
    says = f"model folder {folder}: config.json says tie_word_embeddings={'true' if tied else 'false'}"
    if not tied and HEAD not in tensors:
        by_default = "" if "tie_word_embeddings" in raw else " by saying nothing of it"
        raise ConfigError(
            f"{says}{by_default}, but there is no {HEAD}, so the output head would be made up: set it to true if the head is the "
            "embedding, or save the model again."
        )
    if tied and HEAD in tensors and not _same_values(tensors[HEAD], tensors[EMBED]):
        raise ConfigError(
            f"{says}, but {HEAD} differs from {EMBED}, and one of the two would be ignored: set it to false, or leave {HEAD} out."
        )


def _same_values(one: StoredTensor, other: StoredTensor) -> bool:
    if (one.place.dtype, one.place.shape) != (other.place.dtype, other.place.shape):
        return False
    with one.file.open("rb") as left, other.file.open("rb") as right:
        left.seek(one.place.begin)
        right.seek(other.place.begin)
        rest = one.place.end - one.place.begin
        while rest > 0:
            if (read := left.read(min(rest, 1 << 20))) != right.read(len(read)) or not read:
                return False
            rest -= len(read)
    return True


class _AddedToken(msgspec.Struct):
    id: int


class _Vocabulary(msgspec.Struct):
    vocab: dict[str, int] | list[Any] = {}


class _Tokenizer(msgspec.Struct):
    model: _Vocabulary
    added_tokens: list[_AddedToken] = []


def _check_tokens(folder: Path, raw: Mapping[str, Any], tensors: Mapping[str, StoredTensor]) -> None:
    """A token beyond the embedding would fail in the middle of a run. What is no tokenizer.json is told by who reads it."""
    path = folder / "tokenizer.json"
    try:
        if path.stat().st_size > LARGEST_BESIDE:
            return
        found = msgspec.json.decode(path.read_bytes(), type=_Tokenizer)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return
    vocab = found.model.vocab
    ids = list(vocab.values()) if isinstance(vocab, dict) else [len(vocab) - 1]
    last = max([*ids, *(token.id for token in found.added_tokens)], default=-1)
    rows = tensors[EMBED].place.shape[0] if EMBED in tensors else text_part(raw).get("vocab_size")
    if isinstance(rows, int) and last >= rows:
        raise ConfigError(
            f"model folder {folder}: tokenizer.json has tokens up to id {last}, but the model's embedding has {rows} rows: take the "
            "tokenizer that belongs to it, or resize the embedding and save the model again."
        )


DESCRIBED = ("model_type", "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
"""Of config.json: what two folders of one model have in common, whatever wrote them."""


def same_model(one: Path, other: Path) -> bool:
    """Whether two folders hold the same kind of model with the same tokenizer; True where one of them does not say. Blocks."""
    try:
        configs = [msgspec.json.decode((folder / "config.json").read_bytes(), type=dict[str, Any]) for folder in (one, other)]
        tokens = [(folder / "tokenizer.json").read_bytes() for folder in (one, other)]
    except (OSError, msgspec.MsgspecError):
        return True
    described = [[config.get(key) for key in DESCRIBED] for config in configs]
    return described[0] == described[1] and tokens[0] == tokens[1]
