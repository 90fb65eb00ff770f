"""What a launch says of a model folder: what the built-in engine would compute wrongly, or die on, is refused by name before anything starts."""

import json
import math
import struct

import pytest

from rubato.runtime import cli

SHAPE = {
    "vocab_size": 12, "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 4, "max_position_embeddings": 4096, "hidden_act": "silu", "rms_norm_eps": 1e-6, "tie_word_embeddings": True,
}  # fmt: skip

E, F, Q, KV, D = 8, 16, 16, 8, 4

FAMILIES = {
    "llama": {},
    "mistral": {},
    "qwen2": {**{f"self_attn.{x}_proj.bias": [n] for x, n in (("q", Q), ("k", KV), ("v", KV))}},
    "qwen3": {"self_attn.q_norm.weight": [D], "self_attn.k_norm.weight": [D]},
}
"""What a layer has beside that of Llama."""


def layer(family):
    return {
        "input_layernorm.weight": [E], "post_attention_layernorm.weight": [E], "self_attn.q_proj.weight": [Q, E],
        "self_attn.k_proj.weight": [KV, E], "self_attn.v_proj.weight": [KV, E], "self_attn.o_proj.weight": [E, Q],
        "mlp.gate_proj.weight": [F, E], "mlp.up_proj.weight": [F, E], "mlp.down_proj.weight": [E, F], **FAMILIES[family],
    }  # fmt: skip


EXPERTS = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 4, "norm_topk_prob": True}


def with_experts():
    """A model's tensors, whose layers are mixtures."""
    found = {name: shape for name, shape in tensors("qwen3").items() if ".mlp." not in name}
    for at in (f"model.layers.{i}.mlp." for i in range(2)):
        found[f"{at}gate.weight"] = [3, E]
        found |= {f"{at}experts.{i}.{kind}_proj.weight": [4, E] for i in range(3) for kind in ("gate", "up")}
        found |= {f"{at}experts.{i}.down_proj.weight": [E, 4] for i in range(3)}
    return found


def tensors(family="qwen3", num_layers=2, vocab=12):
    layers = {f"model.layers.{i}.{name}": shape for i in range(num_layers) for name, shape in layer(family).items()}
    return {"model.embed_tokens.weight": [vocab, E], "model.norm.weight": [E], **layers}


def write_tensors(path, shapes, *, dtype="F32", filled=()):
    """Zeros, and ones for those that are `filled`."""
    header, body = {}, b""
    for name, shape in shapes.items():
        data = struct.pack("<f", float(name in filled)) * math.prod(shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(body), len(body) + len(data)]}
        body += data
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + body)


class Folder:
    """A model folder of zeros: nothing is computed with it."""

    def __init__(self, path):
        self.path = path
        path.mkdir()
        self.config({})
        self.weights(tensors())
        self.tokens(12)

    def config(self, changes, family="qwen3"):
        described = {"model_type": family, **SHAPE, **changes}
        (self.path / "config.json").write_text(json.dumps({k: v for k, v in described.items() if v != "absent"}))
        return self

    def weights(self, shapes, name="model.safetensors", **how):
        write_tensors(self.path / name, shapes, **how)
        return self

    def tokens(self, num, added=()):
        vocab = {f"w{i}": i for i in range(num)}
        tokenizer = {"model": {"type": "WordLevel", "vocab": vocab}, "added_tokens": [{"id": i} for i in added]}
        (self.path / "tokenizer.json").write_text(json.dumps(tokenizer))
        return self


@pytest.fixture
def folder(tmp_path):
    return Folder(tmp_path / "model")


@pytest.fixture
def dry_run(folder, tmp_path, monkeypatch, capsys):
    """`dry_run(*overrides)`: exit code and what a dry run says of the folder; template and environment are not looked at."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.yaml").write_text(
        "run: {steps: 1}\nactors: {sample_buffer: {class: 'rubato.actors.samples.buffer:SampleBuffer'}, "
        "llm_proxy: {class: 'rubato.actors.proxy.proxy:LLMProxy'}, engine: {class: 'rubato.actors.engines.worker:EngineWorker'}, "
        "trainer: {class: 'rubato.actors.training.trainer:Trainer'}}\n"
    )

    def run(*overrides):
        code = cli.main(("launch", "job.yaml", f"model.path={folder.path}", "--dry-run", *overrides))
        return code, capsys.readouterr().err

    return run


def refused(dry_run, *names, overrides=()):
    code, said = dry_run(*overrides)
    assert code == 2
    assert len(said.splitlines()) == 1, said
    assert [name for name in names if name not in said] == [], said


def taken(dry_run, *overrides):
    assert dry_run(*overrides) == (0, "")


@pytest.mark.parametrize("family", FAMILIES)
def test_the_four_families_of_one_shape_are_taken(family, folder, dry_run):
    folder.config({"sliding_window": None}, family).weights(tensors(family))

    taken(dry_run)


def test_a_mixture_of_experts_is_taken_where_every_layer_is_one(folder, dry_run):
    folder.config(EXPERTS, "qwen3_moe").weights(with_experts())

    taken(dry_run)

    folder.config(EXPERTS | {"mlp_only_layers": [1]}, "qwen3_moe")
    refused(dry_run, "mlp_only_layers", "engine.kind=vllm")
    folder.config(EXPERTS | {"num_experts": 4}, "qwen3_moe")
    refused(dry_run, "mlp.gate.weight has shape [3, 8]", "[4, 8]")


@pytest.mark.parametrize("family", ["mamba", "gemma2", "phi3", "qwen2_moe", "mixtral", ""])
def test_another_family_is_refused_by_its_name_and_with_what_takes_it(family, folder, dry_run):
    folder.config({}, family)

    refused(dry_run, repr(family), "engine.kind=vllm", "llama, mistral, qwen2, qwen3")


@pytest.mark.parametrize("own", ["engine.kind=mine.py:Engine", "engine.kind=scripted"])
def test_what_the_built_in_engine_does_not_take_is_left_to_another_one(own, folder, dry_run, tmp_path):
    (tmp_path / "mine.py").write_text("class Engine: pass")
    folder.config({"hidden_act": "gelu", "model_type": "mamba"})

    taken(dry_run, own)


HEADS = {
    "untied, and none": ({"tie_word_embeddings": False}, {}, ()),
    "untied by saying nothing, and none": ({"tie_word_embeddings": "absent"}, {}, ()),
    "tied, and another one": ({}, {"lm_head.weight": [12, 8]}, ("lm_head.weight",)),
    "tied, and one of another shape": ({}, {"lm_head.weight": [11, 8]}, ()),
    "untied, and one of another shape": ({"tie_word_embeddings": False}, {"lm_head.weight": [11, 8]}, ()),
}
SAID_BY_TRANSFORMERS = ("untied, and one of another shape", "scripted")
"""As the trainer loads it."""


@pytest.mark.parametrize(
    ("case", "engine"), [(case, engine) for case in HEADS for engine in ("torch", "scripted") if (case, engine) != SAID_BY_TRANSFORMERS]
)
def test_weights_and_config_that_disagree_about_the_output_head_are_refused(case, engine, folder, dry_run):
    """By the trainer too, which would make one up, or train one of two."""
    changes, more, filled = HEADS[case]
    folder.config(changes).weights(tensors() | more, filled=filled)

    refused(dry_run, "lm_head.weight", overrides=[f"engine.kind={engine}"])


def test_a_tied_head_that_is_stored_twice_with_the_same_values_is_taken(folder, dry_run):
    folder.weights(tensors() | {"lm_head.weight": [12, 8]})

    taken(dry_run)


def test_an_untied_head_in_another_file_of_the_index_is_found(folder, dry_run):
    parts = {"model-1.safetensors": tensors(), "model-2.safetensors": {"lm_head.weight": [12, 8]}}
    (folder.path / "model.safetensors").unlink()
    for name, shapes in parts.items():
        folder.weights(shapes, name)
    index = {"weight_map": {tensor: name for name, shapes in parts.items() for tensor in shapes}}
    (folder.path / "model.safetensors.index.json").write_text(json.dumps(index))
    folder.config({"tie_word_embeddings": False})

    taken(dry_run)
    (folder.path / "model-2.safetensors").unlink()
    refused(dry_run, "model-2.safetensors", "model.safetensors.index.json")


CONFIGS = {
    "sliding window of Qwen": ({"use_sliding_window": True, "sliding_window": 512, "max_window_layers": 1}, ["sliding_window of 512", "1024"]),
    "sliding window by layer types": (
        {"use_sliding_window": True, "sliding_window": 512, "layer_types": ["full_attention", "sliding_attention"]},
        ["sliding_window of 512"],
    ),
    "a family that is no name": ({"model_type": ["llama"]}, ["model_type ['llama']", "engine.kind=vllm"]),
    "other layers": ({"layer_types": ["full_attention", "linear_attention"]}, ["layer_types", "engine.kind=vllm"]),
    "yarn": ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, ["rope type 'yarn'", "engine.kind=vllm"]),
    "dynamic": ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, ["rope type 'dynamic'"]),
    "longrope, as transformers 5 writes it": ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}}, ["rope type 'longrope'"]),
    "rope by layer type": ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, ["rope parameters", "layer"]),
    "a part of each head": ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor"]),
    "linear without its factor": ({"rope_scaling": {"type": "linear"}}, ["'factor'"]),
    "rope theta that is none": ({"rope_theta": -1}, ["rope_theta is -1"]),
    "positions": ({"max_position_embeddings": 512}, ["max_position_embeddings", "512", "engine.max_len is 1024"]),
    "activation": ({"hidden_act": "gelu_pytorch_tanh"}, ["hidden_act 'gelu_pytorch_tanh'"]),
    "odd heads": ({"head_dim": 3}, ["head_dim 3"]),
    "KV heads that do not divide": ({"num_key_value_heads": 3}, ["num_key_value_heads 3"]),
    "a size that is none": ({"hidden_size": "wide"}, ["hidden_size is 'wide'"]),
    "a size that is missing": ({"intermediate_size": "absent"}, ["'intermediate_size'"]),
    "a flag that is none": ({"tie_word_embeddings": "yes"}, ["tie_word_embeddings is 'yes'"]),
    "more layers than weights": ({"num_hidden_layers": 3}, ["model.layers.2."]),
    "fewer layers than weights": ({"num_hidden_layers": 1}, ["model.layers.1.", "ignored"]),
    "wider than weights": ({"hidden_size": 16}, ["model.embed_tokens.weight has shape [12, 8]", "[12, 16]"]),
    "head size of the family": ({"head_dim": "absent"}, ["self_attn.q_proj.weight has shape [16, 8]", "[512, 8]"]),
    "biases that are not there": ({"attention_bias": True}, ["self_attn.q_proj.bias"]),
    "quantised": ({"quantization_config": {"quant_method": "awq"}}, ["quantization_config"]),
    "within a model that sees": ({"text_config": {"vocab_size": 12}}, ["text_config", "engine.kind=vllm"]),
}  # fmt: skip


@pytest.mark.parametrize("case", CONFIGS)
def test_what_the_engine_would_compute_otherwise_is_refused_by_name(case, folder, dry_run):
    changes, names = CONFIGS[case]
    folder.config(changes)

    refused(dry_run, *names)


TAKEN = {
    "a window that is not in use": {"use_sliding_window": False, "sliding_window": 16},
    "a window as long as sequences": {"use_sliding_window": True, "sliding_window": 1024, "max_window_layers": 0},
    "a window of layers that there are not": {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 2},
    "linear rope, whose factor lengthens it": {"rope_scaling": {"type": "linear", "factor": 4.0}, "max_position_embeddings": 256},
    "llama3's rope": {
        "rope_parameters": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    },
    "rope as it is": {"rope_scaling": None, "rope_theta": 1000000},
    "silu by another name": {"hidden_act": "swish"},
}


@pytest.mark.parametrize("case", TAKEN)
def test_what_the_engine_has_is_taken(case, folder, dry_run):
    folder.config(TAKEN[case])

    taken(dry_run)


@pytest.mark.parametrize("given", [{}, {"sliding_window": 512}])
def test_mistrals_window_is_its_default_and_never_ignored(given, folder, dry_run):
    folder.config(given, "mistral").weights(tensors("mistral"))
    window = given.get("sliding_window", 4096)

    taken(dry_run, f"engine.max_len={window}", "rollout.max_len=400")
    folder.config(given | {"max_position_embeddings": 8192}, "mistral")
    refused(dry_run, f"sliding_window of {window}", overrides=[f"engine.max_len={window + 1}", "rollout.max_len=400"])


def test_llamas_biases_are_those_of_transformers(folder, dry_run):
    biased = {f"self_attn.{x}_proj.bias": [n] for x, n in (("q", Q), ("k", KV), ("v", KV), ("o", E))}
    biased |= {f"mlp.{x}_proj.bias": [n] for x, n in (("gate", F), ("up", F), ("down", E))}
    added = {f"model.layers.{i}.{name}": shape for i in range(2) for name, shape in biased.items()}
    folder.config({"attention_bias": True, "mlp_bias": True}, "llama").weights(tensors("llama") | added)

    taken(dry_run)
    folder.config({"attention_bias": True}, "llama")
    refused(dry_run, "mlp.gate_proj.bias", "ignored")


FILES = {
    "adapter": (lambda path: (path / "adapter_config.json").write_text("{}"), ["adapter_config.json", "merge"]),
    "only pickled weights": (lambda path: (path / "model.safetensors").rename(path / "pytorch_model.bin"), ["no *.safetensors", "pytorch_model.bin"]),
    "only a GGUF file": (lambda path: (path / "model.safetensors").rename(path / "model.gguf"), ["no *.safetensors", "model.gguf", "gguf_file"]),
    "a pointer of Git LFS": (lambda path: (path / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\nsize 1\n"), ["Git LFS"]),
    "a bias of the head": (lambda path: write_tensors(path / "model.safetensors", tensors() | {"lm_head.bias": [12]}), ["lm_head.bias", "ignored"]),
    "weights of another name": (lambda path: (path / "model.safetensors").rename(path / "w.safetensors"), ["model.safetensors", "w.safetensors"]),
    "truncated": (lambda path: (path / "model.safetensors").write_bytes((path / "model.safetensors").read_bytes()[:-8]), ["truncated"]),
    "empty": (lambda path: (path / "model.safetensors").write_bytes(b""), ["empty"]),
    "no config": (lambda path: (path / "config.json").write_text("{nonsense"), ["config.json can't be read"]),
    "a list for a config": (lambda path: (path / "config.json").write_text("[1]"), ["config.json can't be read"]),
    "an index of nothing": (lambda path: ((path / "model.safetensors").rename(path / "a.safetensors"), (path / "model.safetensors.index.json").write_text("{}")), ["index.json can't be read"]),
    "a tensor that is missing": (lambda path: write_tensors(path / "model.safetensors", {k: v for k, v in tensors().items() if "1.mlp.up" not in k}), ["model.layers.1.mlp.up_proj.weight"]),
    "weights of the body alone": (lambda path: write_tensors(path / "model.safetensors", {k.removeprefix("model."): v for k, v in tensors().items()}), ["model.embed_tokens.weight"]),
    "numbers of 8 bits": (lambda path: write_tensors(path / "model.safetensors", tensors(), dtype="I8"), ["type I8"]),
}  # fmt: skip


@pytest.mark.parametrize("case", FILES)
def test_a_folder_that_is_not_whole_is_refused_by_the_file_at_fault(case, folder, dry_run):
    change, names = FILES[case]
    change(folder.path)

    refused(dry_run, *names)


def test_tokens_beyond_the_embedding_are_refused(folder, dry_run):
    folder.tokens(13)
    refused(dry_run, "id 12", "12 rows")

    folder.tokens(12, added=[40])
    refused(dry_run, "id 40", "12 rows")


def test_what_older_versions_of_transformers_stored_beside_the_weights_is_no_flaw(folder, dry_run):
    folder.weights(tensors() | {"model.layers.0.self_attn.rotary_emb.inv_freq": [2]})

    taken(dry_run)
