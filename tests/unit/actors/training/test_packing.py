"""Sequences end to end: what each gives by itself, whatever its neighbours and the family of the model."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rubato.actors.training import forward
from rubato.actors.training.forward import computed, packs, row_of

CPU = torch.device("cpu")
LENGTHS = [30, 29, 16, 14, 9, 9, 3, 1]
SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
FAMILIES = {
    "qwen3": {},
    "llama": {},
    "qwen2": {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
    "mistral": {"sliding_window": 4},
    "gemma3_text": {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
    "gpt2": {"n_embd": 32, "n_head": 2, "n_layer": 2, "n_positions": 64},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
}
UNPACKED = {"lfm2": {"layer_types": ["conv", "full_attention"], "conv_L_cache": 3, "block_multiple_of": 8}}


def model_of(family, options):
    torch.manual_seed(3)
    sizes = {} if family == "gpt2" else SIZES
    config = AutoConfig.for_model(family, **{"vocab_size": 64, "hidden_size": 32, **sizes, **options})
    return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()


def each_alone(model, parts):
    return torch.cat([model.base_model(part.unsqueeze(0), use_cache=False).last_hidden_state[0] for part in parts])


@pytest.mark.parametrize(("family", "taken"), [*((name, True) for name in FAMILIES), *((name, False) for name in UNPACKED)])
def test_a_token_of_a_row_gives_what_it_gives_where_its_sequence_is_alone(family, taken):
    tokens, row = torch.randint(3, 64, (sum(LENGTHS),)), row_of(LENGTHS, CPU)
    model = model_of(family, (FAMILIES | UNPACKED)[family])
    wanted = each_alone(model, tokens.split(LENGTHS))
    (wanted.sin() * torch.arange(len(tokens)).unsqueeze(1)).mean().backward()
    expected = {name: parameter.grad.clone() for name, parameter in model.base_model.named_parameters()}
    model.zero_grad()

    with torch.no_grad():
        forward.let_pack(model)
    found = computed(model, tokens, row).hidden_LD
    (found.sin() * torch.arange(len(tokens)).unsqueeze(1)).mean().backward()

    assert packs(model) == taken
    assert torch.allclose(found, wanted, atol=1e-5)
    for name, parameter in model.base_model.named_parameters():
        assert (parameter.grad - expected[name]).norm() <= 1e-5 * expected[name].norm() + 1e-9, name


def test_a_neighbour_does_not_reach_across(model_folder):
    model = forward.read_model(model_folder, "float32", CPU)
    row, tokens = row_of([6, 5], CPU), torch.arange(11)
    other = tokens.clone()
    other[:6] = 20

    with torch.no_grad():
        before, after = computed(model, tokens, row).hidden_LD, computed(model, other, row).hidden_LD

    assert torch.equal(before[6:], after[6:])
    assert not torch.allclose(before[:6], after[:6])


def test_a_model_whose_attention_is_not_called_by_name_is_padded(model_folder, monkeypatch):
    row, tokens = row_of([6, 5, 2], CPU), torch.arange(13)
    with torch.no_grad():
        expected = computed(forward.read_model(model_folder, "float32", CPU), tokens, row).hidden_LD
    monkeypatch.setattr("transformers.Qwen3PreTrainedModel._supports_attention_backend", False)

    model = forward.read_model(model_folder, "float32", CPU)

    assert not packs(model)
    with torch.no_grad():
        assert torch.allclose(computed(model, tokens, row).hidden_LD, expected, atol=1e-5)


def test_layers_that_look_back_by_other_ways_than_attention_are_found_out():
    model = model_of("qwen3", {})
    model.model.layers[0].mlp.register_forward_hook(lambda _, __, out: out + 0.05 * out.roll(1, dims=1))

    with torch.no_grad():
        taken = forward.let_pack(model)

    assert not taken
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("window", [None, 4])
def test_on_a_gpu_the_kernel_for_any_lengths_gives_what_buckets_do(window):
    torch.manual_seed(1)
    row = row_of(LENGTHS, torch.device("cuda"))
    query = torch.randn(1, 4, sum(LENGTHS), 32, device="cuda", dtype=torch.bfloat16)
    key, value = (torch.randn(1, 2, sum(LENGTHS), 32, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    module = torch.nn.Module()
    module.num_key_value_groups = 2

    found, _ = forward.attention(module, query, key, value, None, packed_row=row, sliding_window=window, scaling=0.2)
    wide = (each.float() for each in (query, key, value))
    expected, _ = forward.attention(module, *wide, None, packed_row=row, sliding_window=window, scaling=0.2)

    assert torch.allclose(found.float(), expected, atol=3e-2)
