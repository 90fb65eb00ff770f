"""Whether a folder holds a model in HF format, as far as its file names tell."""

from pathlib import Path

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
