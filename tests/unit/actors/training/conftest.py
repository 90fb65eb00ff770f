"""Trajectories and a tiny model folder to train on."""

import struct

import pytest

from rubato.actors.messages.generation import VersionSpan
from rubato.actors.messages.samples import Segment, Ticket, Trajectory


@pytest.fixture
def trajectory():
    """Makes a finished trajectory: `tokens`, which of them were sampled, their log-probs, and the reward."""

    def make(tokens, mask, logprobs=None, reward=0.0, version=0):
        logprobs = logprobs or [0.0] * len(tokens)
        spans = tuple(VersionSpan(version, i, i + 1) for i, sampled in enumerate(mask) if sampled)
        segment = Segment(struct.pack(f"<{len(tokens)}i", *tokens), bytes(mask), struct.pack(f"<{len(tokens)}f", *logprobs), spans)
        return Trajectory(Ticket("t", "g", 1, 0, 0, version), (segment,), reward, 1, False, 0.1)

    return make


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory):
    """A random two-layer Qwen3 of 32 tokens in HF format."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(3)
    config = Qwen3Config(
        vocab_size=32,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=64,
        tie_word_embeddings=True,
    )
    folder = tmp_path_factory.mktemp("model")
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder
