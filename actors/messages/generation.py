"""Generation: what environment managers ask of the proxy, and the proxy of engines."""

from typing import ClassVar, Final

import msgspec

from rubato.actors.messages.weights import WeightsDigest
from rubato.bus.message import Ack, Message, Request
from rubato.planning.engine_info import EngineInfo, WeightsNeed

GENERATION: Final = "generation"
"""Service that engines provide: actors find engines by it, whatever their role is called."""


class Sampling(msgspec.Struct, frozen=True, array_like=True):
    """How tokens are drawn. `temperature` 0 is greedy; stop tokens are kept as the last token of the completion.

    Log-probabilities are of the distribution that this describes: of logits divided by `temperature` (greedy: by 1), over what `top_p` keeps.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    stop_token_ids: tuple[int, ...] = ()
    seed: int = 0
    stop: tuple[str, ...] = ()
    """Texts that end the completion with the token that completes one of them."""


class VersionSpan(msgspec.Struct, frozen=True, array_like=True):
    """Tokens [start, end) of a completion were sampled under weight `version`."""

    version: int
    start: int
    end: int


class Tokens(msgspec.Struct, frozen=True, array_like=True):
    """Sampled tokens: int32 ids and float32 log-probabilities (of the distribution sampled from, see Sampling) as little-endian bytes."""

    ids: bytes = b""
    logprobs: bytes = b""
    spans: tuple[VersionSpan, ...] = ()

    def shifted(self, by: int) -> "Tokens":
        """The same, `by` positions later in the completion."""
        if not by:
            return self
        spans = tuple(VersionSpan(s.version, s.start + by, s.end + by) for s in self.spans)
        return Tokens(self.ids, self.logprobs, spans)

    def __add__(self, more: "Tokens") -> "Tokens":
        """These followed by `more`, whose spans start at 0; neighbouring spans of one version become one."""
        if not self.ids:
            return more
        spans = list(self.spans)
        for span in more.shifted(len(self.ids) // 4).spans:
            if spans and spans[-1].version == span.version and spans[-1].end == span.start:
                spans[-1] = VersionSpan(span.version, spans[-1].start, span.end)
            else:
                spans.append(span)
        return Tokens(self.ids + more.ids, self.logprobs + more.logprobs, tuple(spans))

    def extended(self, more: "Tokens") -> "Tokens":
        """These, and what `more` adds at their end, whose spans are positions in the whole completion.

        Overlaps are cut. A gap (a report was missed) adds nothing: what follows it will be sampled again.
        """
        have = len(self.ids) // 4
        if not more.spans or not more.spans[0].start <= have < more.spans[-1].end:
            return self
        skip = (have - more.spans[0].start) * 4
        new = [VersionSpan(s.version, max(s.start - have, 0), s.end - have) for s in more.spans if s.end > have]
        return self + Tokens(more.ids[skip:], more.logprobs[skip:], tuple(new))


class Completion(Message, frozen=True):
    """All of a request's sampled tokens. `finish_reason` is `stop` or `length`."""

    request_id: str
    tokens: Tokens
    finish_reason: str
    engine: str


class Aborted(Message, frozen=True):
    """The request ended early; what was sampled before is kept. `reason` is one sentence."""

    request_id: str
    tokens: Tokens
    reason: str


class HandedBack(Message, frozen=True):
    """Of an engine that drains: the proxy goes on with the request, and its tokens, elsewhere."""

    request_id: str
    tokens: Tokens


class HandedOver(Message, frozen=True):
    """Of an engine that gave the request away: the proxy goes on with it, and its tokens, at `to`; with an empty `to`, where its picker says."""

    request_id: str
    tokens: Tokens
    to: str = ""


class NotItsTurn(Message, frozen=True):
    """Of a proxy whose job had no turn on the engines before the deadline: it says nothing against the request, which may come again."""

    request_id: str
    tokens: Tokens


GenerateReply = Completion | Aborted | HandedBack | HandedOver | NotItsTurn
"""An asker of a proxy meets the first two and the last."""


def why_early(reply: GenerateReply) -> str:
    """Why there is no completion to use, in words."""
    match reply:
        case Completion():
            return "its engine went back to weights that are older than was asked for"
        case Aborted():
            return reply.reason
        case NotItsTurn():
            return "the job had no turn on its engines before the deadline"
        case HandedBack() | HandedOver():
            return "an engine gave the request away, and no proxy went on with it"


class MovedFrom(msgspec.Struct, frozen=True, array_like=True):
    """Where a request that moves is parked, see actors/messages/moves.py."""

    source: str
    incarnation: int
    number: int


class Route(msgspec.Struct, frozen=True, array_like=True):
    """What the proxy's picker goes by, and what it tells the engine: who asks a proxy sets the first two fields at most."""

    task: str = ""
    """Name of the task; empty where the config names none."""
    rollout: bool = False
    """It is a turn of a rollout, of which its manager tells the orchestrator."""
    hand_over: bool = False
    """Prefill only: after the first token the request comes back as HandedOver, and its KV cache waits for the engine that goes on."""
    cache_at: str = ""
    """Engine that keeps the KV cache of prompt and resumed tokens; without it they are computed again."""
    moved: MovedFrom | None = None
    """It is parked there, and this engine goes on with it once it took it from there."""


class Generate(Request[GenerateReply], frozen=True):
    """Sample one completion. Asking again with the same `request_id` joins the request or returns its result."""

    idempotent: ClassVar[bool] = True
    request_id: str
    session: str
    """The trajectory: requests of one session prefer the engine that holds its KV cache."""
    prompt: bytes
    """int32 little-endian token ids of everything so far."""
    sampling: Sampling
    weights: WeightsNeed = WeightsNeed()
    """The engine pulls first if it must; Aborted where an exact version is held by no engine."""
    resumed: Tokens = Tokens()
    """Tokens already sampled elsewhere (a dead or drained engine): they count towards the completion and are not sampled again.
    The reply begins with them."""
    route: Route = Route()


class Abort(Request[Ack], frozen=True):
    """End a request between two decode steps; its asker gets `Aborted` with the tokens so far. Unknown ids are ignored."""

    idempotent: ClassVar[bool] = True
    request_id: str
    reason: str = "asked"


class TokensSampled(Message, frozen=True):
    """Engine → proxy, every few decode steps: progress of running requests, so that an engine's death costs few tokens.

    Each entry holds the tokens since the last report of that request; its spans are positions in the whole completion (resumed
    tokens counted), so that a proxy that missed a report sees the gap.
    """

    engine: str
    progress: tuple[tuple[str, Tokens], ...]
    names: dict[str, str] = {}
    """Request id → name of the weights that it is sampled under, of those where that is not ""."""


class EngineStatus(Message, frozen=True):
    """An engine's own account of itself: a restarted proxy rebuilds its table from these."""

    info: EngineInfo
    running: tuple[str, ...]
    """Request ids waiting or running."""
    finished: tuple[str, ...]
    """Request ids whose result is still kept for an asker that lost its reply."""
    digest: WeightsDigest | None = None
    """As that of WeightsTaken, of the version that it took last."""


class Inspect(Request[EngineStatus], frozen=True):
    """Ask an engine for its status."""

    idempotent: ClassVar[bool] = True


class Suspend(Request[Ack], frozen=True):
    """Stop decoding between two steps; requests stay where they are."""

    idempotent: ClassVar[bool] = True


class Resume(Request[Ack], frozen=True):
    """Go on decoding after Suspend."""

    idempotent: ClassVar[bool] = True


class InfoChanged(Request[Ack], frozen=True):
    """Engine → proxies: what decides which requests it gets is now this."""

    idempotent: ClassVar[bool] = True
    info: EngineInfo
