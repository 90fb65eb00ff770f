"""What a trainer needs of its host, model folder and process, looked at by the process that starts it alone."""

from pathlib import Path
from typing import Any

from rubato.actors import plugins
from rubato.actors.checkpoints import checkpoint as checkpoints
from rubato.actors.checkpoints.devices import check_device, may_use_cuda
from rubato.actors.checkpoints.model_check import check_model_folder, same_model
from rubato.actors.checkpoints.model_folder import ADAPTER_CONFIG
from rubato.actors.training.hooks import check_hooks
from rubato.actors.training.train_engine import TRAIN_ENGINES
from rubato.runtime.errors import ConfigError
from rubato.runtime.importer import check_module


def check_host(config: Any) -> None:
    """Look for what would else be missed only after minutes of preparation: the device, what hooks need, a loss of the user's own."""
    check_device(config.model.device)
    check_hooks(config)
    if ":" in config.train.loss:
        check_module(config.train.loss, key="train.loss")


def preflight(config: Any, folder: Path) -> None:
    """The model must be there before torch is even imported, and a run that goes on must fit what it has trained. Raises ConfigError."""
    newest = checkpoints.last(folder / "checkpoints")
    if newest is not None and (step := checkpoints.step_of(newest)) > config.run.steps:
        raise ConfigError(
            f"run.steps is {config.run.steps}, and {folder} has trained {step} steps already. Give run.steps={step + 1} or more to go on."
        )
    if config.train.has_model:
        model = folder / config.model.path
        check_model_folder(model)
        if newest is not None and (newest / ADAPTER_CONFIG).exists() and config.train.lora is None:
            raise ConfigError(f"checkpoint {newest} holds an adapter: set train.lora as its run had it, or start another run with --force.")
        if newest is not None and not same_model(model, newest):
            raise ConfigError(
                f"model.path={config.model.path} is another model than the one that {newest} was trained from: its config.json or "
                "tokenizer.json differs. Start another run for it."
            )
    if config.train.reference:
        check_model_folder(folder / config.train.reference, key="train.reference")
    for check in plugins.named(plugins.TRAIN_PREFLIGHTS, config):
        check(config, folder)


def preload(config: Any) -> tuple[str, ...] | None:
    """Modules that it trains with; a loss of the user's own is not imported before."""
    if config.train.kind != "torch" or plugins.ranked_engine(config):
        return ()
    path = plugins.train_engine(config.train) or TRAIN_ENGINES["torch"]
    transformers = "transformers.models.auto.modeling_auto"
    return None if may_use_cuda(config.model.device) else ("torch", path.partition(":")[0], transformers)
