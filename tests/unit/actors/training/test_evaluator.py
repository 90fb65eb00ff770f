"""Weights of a folder as they are published for an evaluation."""

import json

import pytest
import torch
from safetensors.torch import load, save_file

from rubato.actors.training.evaluator import StoredWeights

TENSORS = {f"layer.{at}": torch.arange(at * 3, at * 3 + 6, dtype=torch.float32).reshape(2, 3) for at in range(4)} | {
    "odd": torch.arange(3).to(torch.bfloat16)
}


def exported(folder):
    stored = StoredWeights(folder)
    memory = bytearray(stored.image_bytes())
    stored.export(memoryview(memory))()
    return load(bytes(memory))


def in_files(folder, *parts):
    """The tensors by these names, a file for each part."""
    named = {}
    for at, names in enumerate(parts):
        file = f"model-{at}.safetensors"
        save_file({name: TENSORS[name] for name in names}, folder / file, {"format": "pt"})
        named |= dict.fromkeys(names, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": named}))


def test_weights_in_one_file_and_in_several_are_the_same_image(tmp_path):
    one, several = tmp_path / "one", tmp_path / "several"
    one.mkdir()
    several.mkdir()
    save_file(TENSORS, one / "model.safetensors")
    in_files(several, ["odd", "layer.2"], ["layer.0"], ["layer.3", "layer.1"])

    for folder in (one, several):
        found = exported(folder)
        assert found.keys() == TENSORS.keys()
        assert all(torch.equal(found[name], TENSORS[name]) for name in TENSORS)
        assert all(found[name].dtype == TENSORS[name].dtype for name in TENSORS)


def test_an_adapter_keeps_what_its_header_says_beside_its_tensors(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    file = tmp_path / "adapter_model.safetensors"
    save_file(TENSORS, file, {"rank": "16"})
    stored = StoredWeights(tmp_path)
    memory = bytearray(stored.image_bytes())

    stored.export(memoryview(memory))()

    assert memory == file.read_bytes()


def test_a_file_that_is_gone_is_named(tmp_path):
    in_files(tmp_path, ["odd"], ["layer.0"])
    (tmp_path / "model-1.safetensors").unlink()

    with pytest.raises(ValueError, match=r"has no model-1.safetensors, which model.safetensors.index.json names"):
        StoredWeights(tmp_path)
