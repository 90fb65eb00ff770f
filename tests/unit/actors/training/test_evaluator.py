"""Weights of a folder as they are published for an evaluation."""

import json

import pytest
import torch
from safetensors.torch import load, load_file, save_file

from rubato.actors.adapters import shapes
from rubato.actors.training.evaluator import StoredWeights

TENSORS = {f"layer.{at}": torch.arange(at * 3, at * 3 + 6, dtype=torch.float32).reshape(2, 3) for at in range(4)} | {
    "odd": torch.arange(3).to(torch.bfloat16)
}


def exported(folder):
    stored = StoredWeights(folder, folder)
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


@pytest.fixture
def adapter(tmp_path):
    """`adapter(…)`: the folder of an adapter of rank 4 in peft's format, whose file says this of itself."""
    name = f"{shapes.PREFIX}model.layers.0.mlp.up_proj"
    tensors = {f"{name}{shapes.DOWN}": torch.rand(4, 64), f"{name}{shapes.UP}": torch.rand(96, 4)}

    def make(told):
        (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 4, "lora_alpha": 6}')
        save_file(tensors, tmp_path / "adapter_model.safetensors", told)
        return tmp_path

    return make


def test_an_adapter_keeps_what_its_header_says_beside_its_tensors(adapter):
    folder = adapter({shapes.RANK: "4", shapes.ALPHA: "6.0", shapes.BASE: "x"})
    stored = StoredWeights(folder, folder)
    memory = bytearray(stored.image_bytes())

    stored.export(memoryview(memory))()

    assert memory == (folder / "adapter_model.safetensors").read_bytes()


def test_an_adapter_that_others_made_is_published_as_what_its_config_says(adapter, model_folder):
    folder = adapter({"format": "pt"})
    stored = StoredWeights(folder, model_folder)
    memory = bytearray(stored.image_bytes())

    stored.export(memoryview(memory))()

    found, kept = load(bytes(memory)), load_file(folder / "adapter_model.safetensors")
    assert found.keys() == kept.keys()
    assert all(torch.equal(found[name], kept[name]) for name in kept)
    assert shapes.scaled_by(memoryview(memory), "it") == (4, 6.0)
    assert shapes.told_of(memoryview(memory))[shapes.BASE] == shapes.base_of(model_folder)


def test_a_file_that_is_gone_is_named(tmp_path):
    in_files(tmp_path, ["odd"], ["layer.0"])
    (tmp_path / "model-1.safetensors").unlink()

    with pytest.raises(ValueError, match=r"has no model-1.safetensors, which model.safetensors.index.json names"):
        StoredWeights(tmp_path, tmp_path)
