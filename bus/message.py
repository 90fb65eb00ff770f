"""Typed messages: frozen structs, one per act, with the reply type written in the request's class.

Fields that carry many numbers or bytes are a Buffer or an Array: raw little-endian memory, never lists on the wire.
"""

import math
import sys
import types
from array import array
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar, Union, cast, get_args, get_origin

import msgspec

from rubato.bus.errors import BadFrame

if TYPE_CHECKING:
    import numpy
    import numpy.typing

ReplyT = TypeVar("ReplyT")


class Message(msgspec.Struct, frozen=True, array_like=True):
    """Base of everything sent over the bus. Evolve by appending fields with defaults, never by reordering."""


class Request(Message, Generic[ReplyT], frozen=True):
    """A message that is answered by exactly one `ReplyT` (a message class, or a union of them).

    `idempotent` promises that it may run again: with the same fields, at the same time or after it succeeded, and the state is that of
    one run. So `Ref.ask` sends it again when a link broke, and no reply is remembered. What is too dear to run twice carries an id
    (`Generate.request_id`), by which its handler joins the run that is under way.
    """

    idempotent: ClassVar[bool] = False


class Ack(Message, frozen=True):
    """The empty reply: the request was carried out."""


def reply_types(request: type[Request[Any]]) -> Mapping[str, type[Message]]:
    """Tag → class of every reply that `request` may get.

    Raises TypeError when the class does not name its reply as `Request[Reply]`.
    """
    for base in getattr(request, "__orig_bases__", ()):
        if get_origin(base) is Request:
            (reply,) = get_args(base)
            members = get_args(reply) if get_origin(reply) in (Union, types.UnionType) else (reply,)
            return {member.__name__: member for member in members}
    raise TypeError(f"{request.__name__} must subclass Request[Reply] directly, naming its reply type")


def tag_of(message: type[Message]) -> str:
    """The name under which a message class travels."""
    return message.__name__


# -- memory as a field --------------------------------------------------------------------------------------------------

ITEM_BYTES: Mapping[str, int] = MappingProxyType(
    {
        "bool": 1,
        "int8": 1,
        "uint8": 1,
        "int16": 2,
        "uint16": 2,
        "int32": 4,
        "uint32": 4,
        "int64": 8,
        "uint64": 8,
        "float16": 2,
        "bfloat16": 2,
        "float32": 4,
        "float64": 8,
    }
)
"""Every dtype that may travel. Fixed sizes and no objects, so bytes of any content are a valid array."""

MAX_DIMENSIONS = 16

Bytes = bytes | bytearray | memoryview


class Buffer:
    """Plain bytes as a message field; from 64 KiB on they travel beside the body and are not copied on the way.

    `data` is read-only. A sender must leave the memory alone until the peer has it: it is not copied at `post`.
    """

    __slots__ = ("data",)

    def __init__(self, data: Bytes) -> None:
        self.data: memoryview = _flat(data)

    def __len__(self) -> int:
        return len(self.data)

    def __bytes__(self) -> bytes:
        return bytes(self.data)

    def __eq__(self, other: object) -> bool:
        return self.data == other.data if isinstance(other, Buffer) else NotImplemented

    def __hash__(self) -> int:
        return hash((len(self.data), bytes(self.data[:64])))

    def __repr__(self) -> str:
        return f"Buffer({len(self.data)} bytes)"


class Array:
    """A dense C-ordered array as a message field. Memory is shared with its maker, under the same rule as Buffer.

    Raises BadFrame for a dtype outside `ITEM_BYTES`, a negative dimension, or a shape that does not fill `data` exactly.
    """

    __slots__ = ("data", "dtype", "shape")

    def __init__(self, dtype: str, shape: Sequence[int], data: Bytes) -> None:
        self.dtype = dtype
        self.shape = tuple(shape)
        self.data: memoryview = _flat(data)
        _check_shape(dtype, self.shape, len(self.data))

    @classmethod
    def from_numpy(cls, values: "numpy.typing.NDArray[Any]") -> "Array":
        """Share the memory of a contiguous array; a strided or big-endian one is copied first."""
        import numpy

        dense = numpy.ascontiguousarray(values, dtype=values.dtype.newbyteorder("<"))
        # `reshape` before `data`: memoryview cannot flatten an array with a dimension of 0, nor one of 0 dimensions.
        return cls(values.dtype.name, values.shape, dense.reshape(-1).view(numpy.uint8).data if dense.size else b"")

    def numpy(self) -> "numpy.typing.NDArray[Any]":
        """A read-only view of the same memory. numpy has no bfloat16: its bit patterns come as uint16."""
        import numpy

        name = "uint16" if self.dtype == "bfloat16" else self.dtype
        return numpy.frombuffer(self.data, numpy.dtype(name).newbyteorder("<")).reshape(self.shape)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Array):
            return NotImplemented
        return (self.dtype, self.shape) == (other.dtype, other.shape) and self.data == other.data

    def __hash__(self) -> int:
        return hash((self.dtype, self.shape, bytes(self.data[:64])))

    def __repr__(self) -> str:
        return f"Array({self.dtype}, {self.shape})"


def _check_shape(dtype: str, shape: Sequence[int], size_bytes: int) -> None:
    """Raise BadFrame unless an array of `dtype` and `shape` takes exactly `size_bytes`. Allocates nothing."""
    item_bytes = ITEM_BYTES.get(dtype)
    if item_bytes is None:
        raise BadFrame(f"dtype {dtype!r} does not travel; use one of {', '.join(ITEM_BYTES)}")
    if len(shape) > MAX_DIMENSIONS or any(size < 0 for size in shape):
        raise BadFrame(f"an array has at most {MAX_DIMENSIONS} dimensions, none negative; got shape {tuple(shape)}")
    # Python integers do not wrap around: no shape from the wire can multiply to a small number by overflow.
    wanted = math.prod(shape) * item_bytes
    if wanted != size_bytes:
        raise BadFrame(f"{dtype} of shape {tuple(shape)} takes {wanted} bytes, got {size_bytes}")


def pack_i32(values: Iterable[int]) -> bytes:
    """Token ids as they travel: four little-endian bytes each. Raises OverflowError for what does not fit."""
    return _pack("i", values)


def pack_f32(values: Iterable[float]) -> bytes:
    return _pack("f", values)


def unpack_u8(data: Bytes) -> list[int]:
    return list(data)


def well_formed(value: Any) -> Any:
    """A text, or dicts and lists of texts, in Unicode: a surrogate that stands alone, which no wire holds, becomes U+FFFD."""
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        return value
    if isinstance(value, Mapping):
        return {well_formed(key): well_formed(item) for key, item in cast("Mapping[Any, Any]", value).items()}
    if isinstance(value, list | tuple):
        return [well_formed(item) for item in cast("list[Any]", value)]
    return value


def unpack_i32(data: Bytes) -> list[int]:
    """Raises BadFrame when `data` is not a whole number of items; so does `unpack_f32`."""
    return _unpack("i", data)


def unpack_f32(data: Bytes) -> list[float]:
    return _unpack("f", data)


def _pack(code: str, values: Iterable[float]) -> bytes:
    items: array[Any] = array(code, values)
    if sys.byteorder == "big":
        items.byteswap()
    return items.tobytes()


def _unpack(code: str, data: Bytes) -> list[Any]:
    items: array[Any] = array(code)
    try:
        items.frombytes(data)
    except ValueError:
        raise BadFrame(f"{len(data)} bytes are not a whole number of {items.itemsize}-byte items") from None
    if sys.byteorder == "big":
        items.byteswap()
    return items.tolist()


def _flat(data: Bytes) -> memoryview:
    view = memoryview(data)
    if not view.contiguous:
        raise ValueError("only contiguous memory can travel; copy it first")
    # A view with a zero in its shape cannot be cast, but it is empty whatever its shape.
    return (view.cast("B") if view.nbytes else memoryview(b"")).toreadonly()
