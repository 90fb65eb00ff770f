import subprocess
import sys

import numpy
import pytest

from rubato.bus.errors import BadFrame
from rubato.bus.message import ITEM_BYTES, Array, Buffer, pack_i32, unpack_f32, unpack_i32, unpack_u8


@pytest.mark.parametrize("dtype", sorted(ITEM_BYTES))
def test_every_dtype_views_its_bytes_in_numpy_without_a_copy(dtype):
    data = bytes(range(6 * ITEM_BYTES[dtype]))
    array = Array(dtype, (2, 3), data)

    view = array.numpy()

    assert view.shape == (2, 3)
    assert view.itemsize == ITEM_BYTES[dtype]
    assert not view.flags.writeable
    assert view.tobytes() == data


@pytest.mark.parametrize(
    "values",
    [
        numpy.arange(6, dtype=numpy.int32).reshape(2, 3),
        numpy.arange(6, dtype=numpy.float32).reshape(2, 3).T,
        numpy.arange(4, dtype=">i8"),
        numpy.zeros((3, 0, 2), dtype=numpy.float16),
        numpy.array(7, dtype=numpy.uint8),
        numpy.array([True, False]),
    ],
    ids=["dense", "transposed", "big-endian", "empty", "scalar", "bool"],
)
def test_an_array_from_numpy_holds_the_same_values(values):
    array = Array.from_numpy(values)

    assert array.dtype == values.dtype.name
    assert array.shape == values.shape
    assert (array.numpy() == values).all()


def test_a_dense_numpy_array_is_shared_not_copied():
    values = numpy.zeros(4, dtype=numpy.int32)
    array = Array.from_numpy(values)

    values[0] = 9

    assert array.numpy()[0] == 9


@pytest.mark.parametrize(
    ("dtype", "shape", "size", "message"),
    [
        ("object", (1,), 8, "does not travel"),
        ("int32", (3,), 11, "takes 12 bytes, got 11"),
        ("int32", (), 8, "takes 4 bytes, got 8"),
        ("int32", (-1, -3), 12, "none negative"),
        ("uint8", (1,) * 17, 1, "at most 16 dimensions"),
        ("uint8", (2**32, 2**32), 0, "takes 18446744073709551616 bytes, got 0"),
    ],
)
def test_an_array_whose_shape_does_not_fill_its_bytes_is_refused(dtype, shape, size, message):
    with pytest.raises(BadFrame, match=message):
        Array(dtype, shape, bytes(size))


def test_a_buffer_is_a_read_only_view_of_any_contiguous_memory():
    numbers = numpy.arange(4, dtype=numpy.int16)

    buffer = Buffer(memoryview(numbers))

    assert (len(buffer), bytes(buffer)) == (8, numbers.tobytes())
    assert buffer.data.readonly
    assert buffer == Buffer(bytearray(numbers.tobytes()))
    assert len({buffer, Buffer(numbers.tobytes())}) == 1
    assert repr(buffer) == "Buffer(8 bytes)"


def test_memory_with_gaps_is_refused():
    with pytest.raises(ValueError, match="only contiguous memory"):
        Buffer(memoryview(bytes(10))[::2])


def test_arrays_compare_by_type_shape_and_bytes():
    array = Array("uint8", (4,), b"abcd")

    assert array == Array("uint8", (4,), bytearray(b"abcd"))
    assert hash(array) == hash(Array("uint8", (4,), b"abcd"))
    assert array != Array("uint8", (2, 2), b"abcd")
    assert array != Array("int8", (4,), b"abcd")
    assert array != b"abcd"
    assert repr(array) == "Array(uint8, (4,))"


def test_token_ids_and_probabilities_travel_little_endian():
    ids = [1, -(2**31), 2**31 - 1]

    assert pack_i32(ids).startswith(b"\x01\0\0\0")
    assert unpack_i32(memoryview(pack_i32(ids))) == ids
    assert unpack_f32(b"\0\0\x80\x3f\0\0\0\xbf") == [1.0, -0.5]
    assert unpack_i32(b"") == unpack_f32(b"") == []


def test_a_mask_is_a_byte_for_each_token():
    assert unpack_u8(bytes([1, 255, 0])) == [1, 255, 0]


def test_bytes_that_are_not_whole_items_are_refused():
    with pytest.raises(BadFrame, match="7 bytes are not a whole number of 4-byte items"):
        unpack_i32(bytes(7))


def test_a_token_id_that_does_not_fit_is_refused():
    with pytest.raises(OverflowError):
        pack_i32([2**31])


def test_the_bus_imports_without_numpy():
    code = "import sys, rubato.bus.codec, rubato.bus.transport; sys.exit('numpy' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
