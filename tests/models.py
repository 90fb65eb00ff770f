"""Tiny random HF models for tests, and the independent reference: transformers' own forward and generate."""

import math
from functools import cache
from pathlib import Path

VOCAB = 97

WORDS = ["<pad>", "<eos>", *(f"w{i}" for i in range(VOCAB - 2))]


def write_model(folder: Path, family: str = "qwen3", *, seed: int = 0, vocab_size: int = VOCAB) -> Path:
    """A two-layer decoder with lively weights, and a word-level tokenizer."""
    import torch
    from transformers import (
        LlamaConfig,
        LlamaForCausalLM,
        MistralConfig,
        MistralForCausalLM,
        Qwen2Config,
        Qwen2ForCausalLM,
        Qwen3Config,
        Qwen3ForCausalLM,
        Qwen3MoeConfig,
        Qwen3MoeForCausalLM,
    )

    shape = {
        "vocab_size": vocab_size,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 1024,
        "eos_token_id": 1,
        "pad_token_id": 0,
        "bos_token_id": None,
    }
    torch.manual_seed(seed)
    if family == "qwen3":
        model = Qwen3ForCausalLM(Qwen3Config(**shape, tie_word_embeddings=True))
    elif family == "qwen3_moe":
        mixture = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**shape, **mixture, tie_word_embeddings=False))
    elif family == "mistral":
        model = MistralForCausalLM(MistralConfig(**shape, sliding_window=256))
    elif family == "qwen2":
        model = Qwen2ForCausalLM(Qwen2Config(**shape, use_sliding_window=False))
    else:
        scaling = {
            "rope_type": "llama3",
            "rope_theta": 5000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
        config = LlamaConfig(**shape, tie_word_embeddings=False, attention_bias=True, rope_parameters=scaling)
        model = LlamaForCausalLM(config)
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(torch.randn_like(weight) * 0.2 + (1.0 if weight.ndim == 1 else 0.0))
    model.save_pretrained(folder)
    _write_tokenizer(folder)
    return folder


def weights_image(folder: Path) -> memoryview:
    """The model's safetensors file, as a trainer would publish it."""
    return memoryview((folder / "model.safetensors").read_bytes())


def logprobs(folder: Path, tokens: list[int], temperature: float = 1.0, top_p: float = 1.0) -> list[float]:
    """log p(token | those before it) of every token but the first, from transformers; temperature 0 counts as 1."""
    import torch

    with torch.inference_mode():
        logits = _reference(folder)(torch.tensor([tokens])).logits[0].float() / (temperature or 1.0)
        probs = [row.tolist() for row in logits.double().softmax(-1)]
    return [math.log(probs[i - 1][token] / _kept(probs[i - 1], top_p)) for i, token in enumerate(tokens) if i]


def _kept(probs: list[float], top_p: float) -> float:
    """The probability of the most probable tokens that reach `top_p` together."""
    kept = 0.0
    for value in sorted(probs, reverse=True):
        if kept >= top_p:
            break
        kept += value
    return kept if top_p < 1.0 else 1.0


def greedy(folder: Path, prompt: list[int], num: int) -> list[int]:
    """What transformers' generate samples at temperature 0, without stopping."""
    import torch

    ids = torch.tensor([prompt])
    out = _reference(folder).generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=num, min_new_tokens=num, eos_token_id=None
    )
    return out[0, len(prompt) :].tolist()


@cache
def _reference(folder: Path):
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def _write_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>").save_pretrained(folder)
