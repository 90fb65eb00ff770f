"""Tokens between lists and the packed form that messages carry."""

import struct
from collections.abc import Sequence

from actors.messages.generation import Tokens, VersionSpan


def pack(ids: Sequence[int], logprobs: Sequence[float], spans: Sequence[VersionSpan]) -> Tokens:
    """Lists of equal length as one Tokens: little-endian int32 and float32."""
    num = len(ids)
    return Tokens(struct.pack(f"<{num}i", *ids), struct.pack(f"<{num}f", *logprobs), tuple(spans))


def unpack_ids(packed: bytes) -> tuple[int, ...]:
    """Token ids from little-endian int32 bytes. Raises ValueError when they are not whole."""
    if len(packed) % 4:
        raise ValueError(f"{len(packed)} bytes of token ids are not whole int32 values")
    return struct.unpack(f"<{len(packed) // 4}i", packed)


def unpack_logprobs(packed: bytes) -> tuple[float, ...]:
    """Log-probabilities from little-endian float32 bytes. Raises ValueError when they are not whole."""
    if len(packed) % 4:
        raise ValueError(f"{len(packed)} bytes of log-probs are not whole float32 values")
    return struct.unpack(f"<{len(packed) // 4}f", packed)


def shifted(tokens: Tokens, by: int) -> Tokens:
    """The same tokens, `by` positions later in the completion."""
    if not by:
        return tokens
    return Tokens(
        tokens.ids, tokens.logprobs, tuple(VersionSpan(s.version, s.start + by, s.end + by) for s in tokens.spans)
    )


def joined(tokens: Tokens, more: Tokens) -> Tokens:
    """`tokens` followed by `more`, whose spans start at 0; neighbouring spans of one version become one."""
    if not tokens.ids:
        return more
    spans = list(tokens.spans)
    for span in shifted(more, len(tokens.ids) // 4).spans:
        if spans and spans[-1].version == span.version and spans[-1].end == span.start:
            spans[-1] = VersionSpan(span.version, spans[-1].start, span.end)
        else:
            spans.append(span)
    return Tokens(tokens.ids + more.ids, tokens.logprobs + more.logprobs, tuple(spans))
