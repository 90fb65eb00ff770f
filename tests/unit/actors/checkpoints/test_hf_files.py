"""Safetensors images: what is read, and what is refused before anything is allocated."""

import json
import struct

import pytest

from rubato.actors.checkpoints.hf_files import TensorPlace, read_header
from rubato.actors.engines.engine import EngineError


def image(header: object, data: bytes = b"") -> memoryview:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return memoryview(struct.pack("<Q", len(text)) + text + data)


def test_the_header_names_type_shape_and_place_of_each_tensor():
    header = {"__metadata__": {"format": "pt"}, "w": {"dtype": "F32", "shape": [2, 1], "data_offsets": [0, 8]}}

    found = read_header(image(header, bytes(8)), "test")

    base = 8 + len(json.dumps(header))
    assert found == {"w": TensorPlace("F32", (2, 1), base, base + 8)}


@pytest.mark.parametrize(
    ("bad", "sentence"),
    [
        (memoryview(b"123"), "only 3 bytes"),
        (memoryview(struct.pack("<Q", 1 << 40) + b"{}"), "its header would have"),
        (image(b"{nonsense"), "can't be read"),
        (image({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}, bytes(4)), "truncated"),
        (image({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, bytes(8)), "does not lie within"),
        (image({"w": {"dtype": "F32", "shape": [2], "data_offsets": [-8, 0]}}, bytes(8)), "does not lie within"),
        (image({"w": {"dtype": "I64", "shape": [1], "data_offsets": [0, 8]}}, bytes(8)), "has type I64"),
    ],
)
def test_a_malformed_or_truncated_image_is_refused_with_a_sentence(bad, sentence):
    with pytest.raises(EngineError, match=sentence):
        read_header(bad, "test")
