"""A tiny model folder, and a folder for files of ranks."""

import pytest


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory):
    """A random two-layer Qwen3 of 32 tokens in HF format, whose head is no copy of its embedding."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(3)
    config = Qwen3Config(
        vocab_size=32,
        hidden_size=32,
        intermediate_size=50,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=64,
        tie_word_embeddings=False,
    )
    folder = tmp_path_factory.mktemp("model")
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def exact_folder(tmp_path_factory):
    """A random model of a family whose layers compute in the type of their weights alone: others have a norm in float32."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(3)
    config = GPT2Config(vocab_size=32, n_positions=64, n_embd=32, n_layer=2, n_head=2, tie_word_embeddings=False)
    folder = tmp_path_factory.mktemp("exact")
    GPT2LMHeadModel(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def mixture_folder(tmp_path_factory):
    """A random mixture of three experts, which two ranks can't share alike."""
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(3)
    config = Qwen3MoeConfig(
        vocab_size=32, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=16,
        max_position_embeddings=64, num_experts=3, num_experts_per_tok=2, moe_intermediate_size=24, norm_topk_prob=True,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("mixture")
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    return folder
