"""Models to put adapters on, and trajectories to train them with."""

import struct

import pytest

from rubato.actors.adapters import shapes
from rubato.actors.adapters.bank import AdapterBank
from rubato.actors.config import LoraSection, ModelSection, TrainSection
from rubato.actors.messages.generation import VersionSpan
from rubato.actors.messages.samples import Segment, Ticket, Trajectory
from tests.models import write_model


@pytest.fixture(scope="session")
def base(tmp_path_factory):
    """A two-layer Qwen3 of 97 tokens."""
    return write_model(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="session")
def trajectory():
    """Makes a finished trajectory: `tokens`, which of them were sampled, their log-probs, and the reward."""

    def make(tokens, mask, logprobs, reward=0.0, version=0):
        spans = tuple(VersionSpan(version, i, i + 1) for i, sampled in enumerate(mask) if sampled)
        segment = Segment(struct.pack(f"<{len(tokens)}i", *tokens), bytes(mask), struct.pack(f"<{len(tokens)}f", *logprobs), spans)
        return Trajectory(Ticket("t", "g", 1, 0, 0, version), (segment,), reward, 1, False, 0.1)

    return make


@pytest.fixture
def adapter_image(base):
    """`adapter_image(seed, …)`: a published image of an adapter with lively values."""

    def make(seed=0, *, lora=None, folder=base, dtype="float32"):
        import torch
        from safetensors.torch import save

        lora = lora or LoraSection(rank=4, alpha=8)
        modules = shapes.target_modules(shapes.shapes_in(folder), lora.targets)
        chance = torch.Generator().manual_seed(seed)
        tensors = {
            name: (torch.randn(*shape, generator=chance) * 0.2).to(getattr(torch, dtype))
            for name, shape in shapes.adapter_shapes(modules, lora.rank).items()
        }
        return memoryview(save(tensors, shapes.telling(shapes.Scaled(lora.rank, lora.alpha), shapes.base_of(folder))))

    return make


PROMPT, GOOD, BAD = [4, 5, 6], 7, 8

SECTIONS = {
    "a": TrainSection(lr=2e-2, minibatches=1, lora=LoraSection(rank=4, alpha=8)),
    "b": TrainSection(lr=1e-2, minibatches=1, lora=LoraSection(rank=2, alpha=4, targets=("q_proj", "down_proj"), dropout=0.2)),
}


def bank_over(base, folder, *, budget_bytes=1 << 40, dtype="float32"):
    """Both adapters, of which none has learned anything."""
    found = AdapterBank(ModelSection(dtype=dtype), base, folder, budget_bytes=budget_bytes)
    for name, train in SECTIONS.items():
        found.add(name, train, steps=10, seed=1)
    return found


def group_of(logprobs, trajectory, good=GOOD):
    """Of four completions of one token, two of them `good`."""
    found = []
    for token in (GOOD, BAD, GOOD, BAD):
        known = [0.0, 0.0, 0.0, logprobs([[*PROMPT, token]])[0][3]]
        found.append(trajectory([*PROMPT, token], [0, 0, 0, 1], known, float(token == good)))
    return [found]


def taught(bank, name, trajectory):
    """One step of that adapter: toward one token for "a", toward another for any other."""
    bank.train(name, group_of(lambda rows: bank.logprobs(name, rows), trajectory, GOOD if name == "a" else BAD))
