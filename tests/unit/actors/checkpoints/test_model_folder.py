"""What the files of a model folder tell without loading it."""

import json

import pytest

from rubato.actors.catalog import shape_of
from rubato.actors.checkpoints import checkpoint as checkpoints
from rubato.actors.checkpoints.devices import may_use_cuda
from rubato.actors.checkpoints.model_check import same_model
from rubato.actors.checkpoints.model_folder import files_beside_weights, num_parameters, pick_device
from rubato.runtime.errors import ConfigError


def write_weights(path, **shapes):
    header = {name: {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]} for name, shape in shapes.items()}
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text)


def test_parameters_are_counted_over_all_files_from_their_headers(tmp_path):
    write_weights(tmp_path / "a.safetensors", x=[3, 5], bias=[7])
    write_weights(tmp_path / "b.safetensors", y=[2, 2, 2])

    assert num_parameters(tmp_path) == 15 + 7 + 8


@pytest.mark.parametrize("content", [b"", b"\xff" * 64, b"\x02\0\0\0\0\0\0\0[]", b'\x06\0\0\0\0\0\0\0{"a":1}'])
def test_damaged_weights_have_no_size(content, tmp_path):
    (tmp_path / "a.safetensors").write_bytes(content)

    assert num_parameters(tmp_path) == 0
    assert num_parameters(tmp_path / "gone") == 0


def write_model(folder, tokens="{}", **config):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3", "hidden_size": 8} | config))
    (folder / "tokenizer.json").write_text(tokens)
    return folder


def test_a_model_is_known_by_its_shape_and_tokenizer(tmp_path):
    one = write_model(tmp_path / "one", use_cache=True)

    assert same_model(one, write_model(tmp_path / "copy", use_cache=False))
    assert same_model(one, tmp_path / "gone")
    assert not same_model(one, write_model(tmp_path / "wider", hidden_size=16))
    assert not same_model(one, write_model(tmp_path / "other words", tokens='{"a": 1}'))


def test_folders_of_a_model_belong_to_its_checkpoints_unless_they_hold_weights(tmp_path):
    model = write_model(tmp_path / "model")
    for name in (
        "additional_chat_templates/tools.jinja", "code/deep/layers.py", "original/params.json", "original/consolidated.00.pth",
        "checkpoint-5/model.safetensors", ".cache/huggingface/x.lock", "model.safetensors", "model.safetensors.index.json",
    ):  # fmt: skip
        (model / name).parent.mkdir(parents=True, exist_ok=True)
        (model / name).write_bytes(name.encode())
    with (model / "data.arrow").open("wb") as file:
        file.truncate(65 * 1024 * 1024)

    found = files_beside_weights(model)
    checkpoints.write(tmp_path / "step_1", found, step=1, term=1)

    assert found.keys() == {"config.json", "tokenizer.json", "additional_chat_templates/tools.jinja", "code/deep/layers.py"}
    assert checkpoints.check(tmp_path / "step_1").files.keys() == {*found, "receipts.msgpack"}
    assert (tmp_path / "step_1/code/deep/layers.py").read_bytes() == b"code/deep/layers.py"


def test_a_checkpoint_whose_inner_file_is_gone_is_damaged(tmp_path):
    checkpoints.write(tmp_path / "step_1", {"a/b.txt": b"x"}, step=1, term=1)
    (tmp_path / "step_1/a/b.txt").unlink()

    with pytest.raises(checkpoints.CheckpointError, match="can't be read"):
        checkpoints.check(tmp_path / "step_1")


@pytest.mark.parametrize(
    ("device", "num", "picked"),
    [
        ("auto", 0, "cpu"),
        ("auto", 2, "cuda"),
        ("cpu", 2, "cpu"),
        ("cuda", 1, "cuda"),
        ("cuda:1", 2, "cuda:1"),
        ("cuda:1", 1, "model.device is cuda:1, but torch sees cuda:0 alone: "),
        ("cuda:8", 8, "model.device is cuda:8, but torch sees cuda:0 to cuda:7 alone: "),
        ("cuda:1", 0, "model.device is cuda:1, but torch sees no CUDA device: "),
    ],
)
def test_a_device_is_one_that_torch_sees(device, num, picked):
    try:
        found = pick_device(device, num)
    except ConfigError as error:
        found = str(error)

    assert found == picked or (picked.endswith(": ") and found.startswith(picked))


@pytest.mark.parametrize(("device", "may"), [("cuda", True), ("cuda:3", True), ("cpu", False)])
def test_what_may_use_a_gpu_is_known_without_torch(device, may):
    assert may_use_cuda(device) == may


def described(folder, **raw):
    (folder / "config.json").write_text(json.dumps(raw))
    return folder


DENSE = {
    "num_hidden_layers": 28, "hidden_size": 1024, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
    "intermediate_size": 3072, "vocab_size": 151936, "tie_word_embeddings": True,
}  # fmt: skip
"""Qwen/Qwen3-0.6B."""


def test_a_models_shape_is_read_from_its_folder(tmp_path):
    dense = shape_of(described(tmp_path, **DENSE))
    experts = shape_of(described(tmp_path, text_config=DENSE | {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 768}))

    assert dense.params == pytest.approx(0.596e9, rel=0.001)
    assert dense.kv_bytes_per_token == 2 * 2 * 28 * 8 * 128
    assert (experts.experts, experts.experts_per_token, experts.expert_ffn, experts.ffn) == (8, 2, 768, 0)


@pytest.mark.parametrize("raw", [{}, DENSE | {"vocab_size": 0}, DENSE | {"hidden_size": None}])
def test_a_folder_that_says_no_shape_is_one_sentence(raw, tmp_path):
    with pytest.raises(ValueError, match="does not say the model's shape, with which the orchestrator counts") as raised:
        shape_of(described(tmp_path, **raw))

    assert len(str(raised.value).splitlines()) == 1
