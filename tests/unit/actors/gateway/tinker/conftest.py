"""A model to serve, data to learn from, and what makes both of them the trainer's."""

import struct

import pytest

from rubato.actors.config import ModelSection, TrainSection
from rubato.actors.messages.tinker import Begin, Datum, ForwardBackward, OptimStep, Tensor
from tests.models import write_model

BEGIN = Begin("toy", 4, 3)


@pytest.fixture(scope="session")
def base(tmp_path_factory):
    """A two-layer Qwen3 of 97 tokens."""
    return write_model(tmp_path_factory.mktemp("base"))


@pytest.fixture
def tuned(base, tmp_path):
    """`tuned(…)`: what holds models over the base model."""
    from rubato.actors.gateway.tinker.torch_models import TorchModels

    def make(budget_bytes=1 << 40, micro_batch_tokens=16384):
        found = TorchModels(ModelSection(), TrainSection(micro_batch_tokens=micro_batch_tokens), base, tmp_path / "aside", budget_bytes)
        found.load()
        return found

    return make


def ints(values, *more):
    flat = [value for row in values for value in row] if more else list(values)
    return Tensor("int64", (len(values), *more), struct.pack(f"<{len(flat)}q", *flat))


def floats(values, *more):
    flat = [value for row in values for value in row] if more else list(values)
    return Tensor("float32", (len(values), *more), struct.pack(f"<{len(flat)}f", *flat))


def datum(tokens, **inputs):
    return Datum(struct.pack(f"<{len(tokens)}i", *tokens), inputs)


ROWS = ([5, 6, 7, 8, 9], [11, 12, 13], [3, 40, 41, 42, 43, 44, 45])
"""Whole sequences: a model's input is all but the last token, its targets are all but the first."""


def taught(*, weights=(0.0, 1.0), rows=ROWS):
    """Of cross_entropy: prompts weigh nothing, and what follows alike."""
    found = [datum(row[:-1], target_tokens=ints(row[1:]), weights=floats([weights[i > 0] for i in range(len(row) - 1)])) for row in rows]
    return ForwardBackward("cross_entropy", tuple(found))


def sampled(loss, *, config=None, rows=ROWS, forward_only=False, **more):
    """Of a loss of policy gradients: advantages of both signs, ratios on both sides of 1. `more` makes each row's other inputs."""
    found = []
    for number, row in enumerate(rows):
        num = len(row) - 1
        logprobs, advantages = [-4.6 + 0.4 * ((i + number) % 3 - 1) for i in range(num)], [(-1.0) ** i * (0.5 + number) for i in range(num)]
        inputs = {"target_tokens": ints(row[1:]), "logprobs": floats(logprobs), "advantages": floats(advantages)}
        found.append(datum(row[:-1], **(inputs | {name: make(num) for name, make in more.items()})))
    return ForwardBackward(loss, tuple(found), config or {}, forward_only)


def lively(models, name, begin=BEGIN):
    """Begun, and moved: of a fresh adapter half of the gradients are 0."""
    models.begin(name, begin)
    for _ in range(3):
        models.forward_backward(name, taught())
        models.optim_step(name, OptimStep(0.05))
