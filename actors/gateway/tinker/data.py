"""What a client sends to be learned from, looked at before any of it is worked on, and as tensors."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from rubato.actors.adapters.stepwise import TargetSequence
from rubato.actors.gateway.tinker.losses import LOSSES, RATIO_MASK, Loss
from rubato.actors.messages import tinker
from rubato.actors.messages.tinker import Datum, ForwardBackward
from rubato.actors.training.train_engine import TrainError

TARGETS, WEIGHTS = "target_tokens", "weights"

TYPES: Mapping[str, torch.dtype] = {"float32": torch.float32, "int64": torch.int64}


def require_loss(operation: ForwardBackward) -> Loss:
    """Raises TrainError for a loss, or something in its config, that there is not."""
    loss = LOSSES.get(operation.loss)
    if loss is None:
        raise TrainError(f"loss_fn={operation.loss[:64]} is not there; there are {', '.join(LOSSES)}")
    for name, value in operation.config.items():
        if name not in loss.config:
            known = ", ".join(loss.config) or "nothing"
            raise TrainError(f"loss_fn_config of {operation.loss} has {name[:64]}, but it takes {known}")
        if not math.isfinite(value):
            raise TrainError(f"loss_fn_config of {operation.loss} has {name}={value}: it has to be finite")
    if not operation.data:
        raise TrainError("there is no datum: send at least one")
    return loss


def sequences_of(operation: ForwardBackward, *, vocab_size: int, most_tokens: int) -> list[TargetSequence]:
    """Raises TrainError, which names the datum, for what does not fit the loss or the model."""
    loss = require_loss(operation)
    found: list[TargetSequence] = []
    for number, datum in enumerate(operation.data):
        try:
            found.append(_sequence(operation, loss, datum, vocab_size, most_tokens))
        except ValueError as error:
            raise TrainError(f"datum {number} of {len(operation.data)}: {error}") from None
    return found


def tokens_of(data: bytes, *, vocab_size: int, most_tokens: int) -> Tensor:
    """[T] int64. Raises ValueError."""
    if not data or len(data) % 4:
        raise ValueError("its input has no tokens" if not data else "its input is no row of int32")
    if len(data) > 4 * most_tokens:
        raise ValueError(f"its input has {len(data) // 4} tokens, but the model takes {most_tokens}")
    return _in_vocabulary(torch.frombuffer(bytearray(data), dtype=torch.int32).long(), "its input", vocab_size)


def _sequence(operation: ForwardBackward, loss: Loss, datum: Datum, vocab_size: int, most_tokens: int) -> TargetSequence:
    tokens = tokens_of(datum.tokens, vocab_size=vocab_size, most_tokens=most_tokens)
    wanted, given = {TARGETS, *loss.needs}, datum.inputs.keys()
    if missing := sorted(wanted - given):
        raise ValueError(f"{operation.loss} needs {missing[0]}, which it lacks")
    if more := sorted(given - wanted - {WEIGHTS, *loss.may}):
        raise ValueError(f"{operation.loss} knows no {more[0][:64]}")
    targets = _tensor(TARGETS, datum.inputs[TARGETS], "int64")
    if targets.shape[:1] != tokens.shape or targets.dim() not in (1, 2) or not targets.numel():
        raise ValueError(f"{TARGETS} has shape {list(targets.shape)}, but the input has {len(tokens)} tokens")
    if loss.most_targets is not None and targets.dim() == 2 and targets.shape[1] > loss.most_targets:
        raise ValueError(f"{TARGETS} has shape {list(targets.shape)}, but {operation.loss} takes one target for each token")
    _in_vocabulary(targets, TARGETS, vocab_size)
    inputs = {name: _tensor(name, each, "float32") for name, each in datum.inputs.items() if name != TARGETS}
    for name, values in inputs.items():
        if values.shape != targets.shape:
            raise ValueError(f"{name} has shape {list(values.shape)}, but {TARGETS} has {list(targets.shape)}")
        if not values.isfinite().all():
            raise ValueError(f"{name} holds a number that is not finite")
    for name, value in ({WEIGHTS: 1.0} | {**loss.config} | operation.config).items():
        inputs.setdefault(name, torch.full(targets.shape, value))
    if RATIO_MASK in loss.may:
        inputs.setdefault(RATIO_MASK, (inputs["advantages"] != 0).float())
    wide = targets.view(len(tokens), -1)
    return TargetSequence(tokens, wide, {name: values.view(wide.shape) for name, values in inputs.items()})


def _tensor(name: str, tensor: tinker.Tensor, dtype: str) -> Tensor:
    if tensor.dtype != dtype:
        raise ValueError(f"{name} is {tensor.dtype}, not {dtype}")
    if any(size < 0 for size in tensor.shape) or len(tensor.shape) > 2:
        raise ValueError(f"{name} has shape {list(tensor.shape)[:8]}")
    if math.prod(tensor.shape) * TYPES[dtype].itemsize != len(tensor.data):
        raise ValueError(f"{name} has {len(tensor.data)} bytes, which are not {dtype} of shape {list(tensor.shape)}")
    if not tensor.data:
        return torch.zeros(tensor.shape, dtype=TYPES[dtype])
    return torch.frombuffer(bytearray(tensor.data), dtype=TYPES[dtype]).view(tensor.shape)


def _in_vocabulary(tokens: Tensor, name: str, vocab_size: int) -> Tensor:
    if len(outside := tokens[(tokens < 0) | (tokens >= vocab_size)]):
        raise ValueError(f"{name} has the token {int(outside[0])}, but the model's vocabulary has {vocab_size}")
    return tokens
