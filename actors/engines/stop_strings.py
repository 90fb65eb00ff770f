"""Texts that end a completion: looked for in what an engine has sampled, chunk by chunk, so that every engine has them."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from actors.messages.generation import Tokens, VersionSpan
from bus.message import unpack_i32

Decode = Callable[[Sequence[int]], str]

MARGIN = 8
"""Tokens before the first that may belong to a text: the bytes of a character are decoded together."""


def decoder(folder: Path) -> Decode:
    """Decodes by the model folder's tokenizer. Blocks."""
    from tokenizers import Tokenizer

    tokenizer: Any = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return lambda ids: tokenizer.decode([*ids], skip_special_tokens=False)


def end_of(tokens: Tokens, since: int, stop: Sequence[str], decode: Decode) -> int | None:
    """How many of `tokens` there are up to the one that completes a text of `stop`, looked for from token `since` on; None without one."""
    first = max(0, since - max(len(text.encode()) for text in stop) - MARGIN)
    ids = unpack_i32(tokens.ids[4 * first :])

    def is_over(num: int) -> bool:
        told = decode(ids[:num])
        return any(text in told for text in stop)

    if not is_over(len(ids)):
        return None
    return first + next(num for num in range(max(1, since - first), len(ids) + 1) if is_over(num))


def first_of(tokens: Tokens, num: int) -> Tokens:
    """The first `num` of `tokens`."""
    spans = tuple(
        VersionSpan(span.version, span.start, min(span.end, num)) for span in tokens.spans if span.start < num
    )
    return Tokens(tokens.ids[: 4 * num], tokens.logprobs[: 4 * num], spans)
