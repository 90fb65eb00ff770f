"""What engines make of values that are stored in another type than they compute in."""

from collections.abc import Mapping

import numpy as np

NUMPY_TYPES: Mapping[str, str] = {"F64": "<f8", "F32": "<f4", "F16": "<f2"}


def rounded(values: bytes, stored: str, dtype: str) -> bytes:
    """Stored values in `dtype`, float32 or bfloat16: to the nearest, ties to even."""
    if stored == "BF16":
        return (np.frombuffer(values, "<u2").astype("<u4") << 16).tobytes()
    floats = np.frombuffer(values, NUMPY_TYPES[stored]).astype("<f4")
    if dtype == "float32":
        return floats.tobytes()
    bits = floats.view("<u4")
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2").tobytes()
