"""What the files of a model folder tell without loading it."""

import json

import pytest

from actors.model_folder import num_parameters, same_model


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
