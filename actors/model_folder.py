"""Whether a folder holds a model in HF format, as far as its file names tell."""

from pathlib import Path

import msgspec

from runtime.errors import ConfigError

NEEDED = ("config.json", "*.safetensors", "tokenizer.json")


def check_model_folder(folder: Path) -> None:
    """Raises ConfigError, one sentence, for a folder that is missing or lacks a part."""
    if not folder.is_dir():
        raise ConfigError(f"model folder {folder} does not exist. Set model.path to a folder in HF format.")
    missing = [pattern for pattern in NEEDED if not any(folder.glob(pattern))]
    if missing:
        what = " and no ".join(missing)
        raise ConfigError(f"model folder {folder} has no {what}. Set model.path to a folder in HF format.")


def vocab_size_of(folder: Path) -> int | None:
    """Number of token ids of the model in `folder`; None where it does not say. Blocks."""
    try:
        config = msgspec.json.decode((folder / "config.json").read_bytes())
    except (OSError, msgspec.MsgspecError):
        return None
    size = config.get("vocab_size") if isinstance(config, dict) else None
    return size if isinstance(size, int) else None
