"""One request inside an engine: its tokens, how far they are cached, and what was sampled but not handed out yet."""

from actors.engines.chance import key_of
from actors.engines.engine import Chunk, EngineError, Work
from actors.engines.tokens import pack, unpack_ids
from actors.messages.generation import VersionSpan


class Sequence:
    """Prompt, resumed and sampled tokens in a row. Belongs to whoever runs the step loop."""

    __slots__ = (
        "finish_reason",
        "key",
        "max_tokens",
        "num_cached",
        "session",
        "slot",
        "stop_ids",
        "temperature_top_p",
        "tokens",
        "unsent_ids",
        "unsent_logprobs",
        "unsent_versions",
        "work",
    )

    def __init__(self, work: Work, max_len: int) -> None:
        self.work = work
        self.session = work.session
        self.tokens = [*work.prompt, *unpack_ids(work.resumed.ids)]
        self.max_tokens = min(max_len, len(work.prompt) + work.sampling.max_new_tokens)
        self.stop_ids = frozenset(work.sampling.stop_token_ids)
        self.temperature_top_p = (work.sampling.temperature, work.sampling.top_p)
        self.key = key_of(work.sampling.seed, work.session or work.request_id)
        self.slot = -1
        self.num_cached = 0
        """Tokens whose keys and values are in the slot."""
        self.unsent_ids: list[int] = []
        self.unsent_logprobs: list[float] = []
        self.unsent_versions: list[tuple[int, int]] = []
        """(version, index of the first unsent token it sampled)"""
        self.finish_reason = ""
        if len(self.tokens) > len(work.prompt):
            self._judge(self.tokens[-1])
        elif len(self.tokens) >= self.max_tokens:
            self.finish_reason = "length"

    def sampled(self, token: int, logprob: float, version: int) -> None:
        """Append one token; sets `finish_reason` when it is the last."""
        self.tokens.append(token)
        self.unsent_ids.append(token)
        self.unsent_logprobs.append(logprob)
        if not self.unsent_versions or self.unsent_versions[-1][0] != version:
            self.unsent_versions.append((version, len(self.unsent_ids) - 1))
        self._judge(token)

    def chunk(self) -> Chunk:
        """What was sampled since the last chunk."""
        ends = [start for _, start in self.unsent_versions[1:]] + [len(self.unsent_ids)]
        spans = [
            VersionSpan(version, start, end) for (version, start), end in zip(self.unsent_versions, ends, strict=False)
        ]
        chunk = Chunk(pack(self.unsent_ids, self.unsent_logprobs, spans), self.finish_reason)
        self.unsent_ids, self.unsent_logprobs, self.unsent_versions = [], [], []
        return chunk

    def _judge(self, token: int) -> None:
        if token in self.stop_ids:
            self.finish_reason = "stop"
        elif len(self.tokens) >= self.max_tokens:
            self.finish_reason = "length"


def check(work: Work, max_len: int, vocab_size: int) -> None:
    """Raises EngineError when `work` could never run: better refused than failing a step that serves others too."""
    prompt, sampling = work.prompt, work.sampling
    if not prompt:
        raise EngineError(f"request {work.request_id} has an empty prompt")
    if len(prompt) >= max_len:
        raise EngineError(
            f"request {work.request_id}: a prompt of {len(prompt)} tokens leaves no room in engine.max_len={max_len}"
        )
    if min(prompt) < 0 or max(prompt) >= vocab_size:
        raise EngineError(f"request {work.request_id} has token ids outside the model's vocabulary of {vocab_size}")
    if not (sampling.temperature >= 0.0 and 0.0 < sampling.top_p <= 1.0):
        text = f"temperature {sampling.temperature} and top_p {sampling.top_p}"
        raise EngineError(f"request {work.request_id} asks for {text}: they must be at least 0, and in (0, 1]")
