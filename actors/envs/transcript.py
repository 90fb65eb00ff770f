"""The growing token context of one trajectory, as raw bytes: what was shown, what was sampled, under which weights."""

from actors.messages.generation import Tokens, VersionSpan
from actors.messages.samples import Segment

TOKEN_BYTES = 4
"""Both an int32 id and a float32 log-probability."""


class Transcript:
    """Appends only. `version_first` and `version_last` are -1 until something was sampled."""

    def __init__(self, opening: bytes) -> None:
        self._tokens = bytearray(opening)
        self._mask = bytearray(len(opening) // TOKEN_BYTES)
        self._logprobs = bytearray(len(opening))
        self._spans: list[VersionSpan] = []
        self.version_first = -1
        self.version_last = -1

    def __len__(self) -> int:
        return len(self._mask)

    @property
    def prompt(self) -> bytes:
        """int32 ids of everything so far."""
        return bytes(self._tokens)

    @property
    def last_token(self) -> int:
        """The newest token's id."""
        return int.from_bytes(self._tokens[-TOKEN_BYTES:], "little", signed=True)

    def show(self, ids: bytes) -> None:
        """Append tokens the model did not sample."""
        self._tokens += ids
        self._mask += bytes(len(ids) // TOKEN_BYTES)
        self._logprobs += bytes(len(ids))

    def sample(self, tokens: Tokens) -> None:
        """Append a completion. Raises ValueError when it is empty or its arrays and spans don't fit together."""
        num = len(tokens.ids) // TOKEN_BYTES
        if num == 0 or len(tokens.ids) != len(tokens.logprobs) or len(tokens.ids) % TOKEN_BYTES:
            raise ValueError(
                f"a completion with {len(tokens.ids)} bytes of ids and {len(tokens.logprobs)} of log-probs"
            )
        end = 0
        for span in tokens.spans:
            if span.start != end or span.end <= span.start:
                raise ValueError(f"spans of a completion leave a gap at token {end}")
            end = span.end
        if end != num:
            raise ValueError(f"spans of a completion cover {end} of {num} tokens")
        offset = len(self._mask)
        self._spans += [VersionSpan(span.version, offset + span.start, offset + span.end) for span in tokens.spans]
        if self.version_first < 0:
            self.version_first = tokens.spans[0].version
        self.version_last = tokens.spans[-1].version
        self._tokens += tokens.ids
        self._mask += b"\1" * num
        self._logprobs += tokens.logprobs

    def segment(self) -> Segment:
        """The whole context as one segment."""
        return Segment(bytes(self._tokens), bytes(self._mask), bytes(self._logprobs), tuple(self._spans))
