"""Completions that are put together from parts."""

from actors.messages.generation import Tokens, VersionSpan


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
