"""Generation: what environment managers ask of the proxy, and the proxy of engines."""

from typing import ClassVar

import msgspec

from actors.messages.weights import WeightsDigest
from bus.message import Ack, Buffer, Message, Request


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


class Completion(Message, frozen=True):
    """All of a request's sampled tokens. `finish_reason` is `stop` or `length`."""

    request_id: str
    tokens: Tokens
    finish_reason: str
    engine: str


HANDED_BACK = "handed back"
"""`Aborted.reason` of an engine that drains: the proxy goes on with the request, and its tokens, elsewhere."""


NOT_ITS_TURN = "the job had no turn on the rollout pool before the deadline"
"""`Aborted.reason` of a proxy whose job waits for a permit: it says nothing against the request, which may come again."""


HANDED_OVER = "handed over"
"""`Aborted.reason` of an engine that only prefills: the proxy has the request decoded elsewhere, with the cache that waits here."""


class Aborted(Message, frozen=True):
    """The request ended early; what was sampled before is kept."""

    request_id: str
    tokens: Tokens
    reason: str
    moved_to: str = ""
    """The engine that has it now: the proxy goes on with it there."""


class MovedFrom(msgspec.Struct, frozen=True, array_like=True):
    """Where a request that moves is parked, see actors/messages/moves.py."""

    source: str
    incarnation: int
    epoch: int


class Generate(Request[Completion | Aborted], frozen=True):
    """Sample one completion. Asking again with the same `request_id` joins the request or returns its result."""

    idempotent: ClassVar[bool] = True
    request_id: str
    session: str
    """The trajectory: requests of one session prefer the engine that holds its KV cache."""
    prompt: bytes
    """int32 little-endian token ids of everything so far."""
    sampling: Sampling
    min_version: int = 0
    """No token is sampled under an older weight version; the engine pulls first if it must."""
    resumed: Tokens = Tokens()
    """Tokens already sampled elsewhere (a dead or drained engine): they count towards the completion and are not sampled again.
    The reply begins with them."""
    exact: bool = False
    """Every token is sampled under `min_version` itself; Aborted where no engine holds it."""
    task: str = ""
    """Name of the task; empty where the config names none."""
    hand_over: bool = False
    """Prefill only: after the first token the request comes back as Aborted with HANDED_OVER, and its KV cache waits for whoever goes on."""
    cache_at: str = ""
    """Engine that keeps the KV cache of prompt and resumed tokens; without it they are computed again."""
    moved: MovedFrom | None = None
    """It is parked there, and this engine goes on with it once it took it from there."""
    rollout: bool = False
    """It is a turn of a rollout, of which its manager tells the orchestrator."""


class Abort(Request[Ack], frozen=True):
    """End a request between two decode steps; its asker gets `Aborted` with the tokens so far. Unknown ids are ignored."""

    idempotent: ClassVar[bool] = True
    request_id: str
    reason: str = "asked"


class TokensSampled(Message, frozen=True):
    """Engine → proxy, every few decode steps: progress of running requests, so that an engine's death costs few tokens.

    Each entry holds the tokens since the last report of that request; its spans are positions in the whole completion (resumed
    tokens counted), so that whoever missed a report sees the gap.
    """

    engine: str
    progress: tuple[tuple[str, Tokens], ...]


class Modelled(msgspec.Struct, frozen=True, array_like=True, order=True):
    """What planners take an engine for: names of configs/hardware and configs/models, and the GPUs that it was started with."""

    hardware: str
    model: str
    """Empty: the job's own model, whose folder says what shape it has."""
    degree: int
    scale: float = 1.0
    """Seconds that a second of that hardware lasts."""


class EngineStatus(Message, frozen=True):
    """An engine's own account of itself: a restarted proxy rebuilds its table from these."""

    engine: str
    version: int
    num_slots: int
    running: tuple[str, ...]
    """Request ids waiting or running."""
    finished: tuple[str, ...]
    """Request ids whose result is still kept for an asker that lost its reply."""
    suspended: bool = False
    held: bool = False
    """It stays on `version` for an evaluation."""
    serves: str = "both"
    """Its `engine.serves`."""
    asleep: bool = False
    degree: int = 1
    """GPUs that share each layer."""
    modelled: Modelled | None = None
    """None where nobody says what hardware it is."""
    restart_s: float = 0.0
    """What a change of degree takes it where it is started anew for that, and its requests' KV is computed again; 0: it goes on."""
    digest: WeightsDigest | None = None
    """As that of WeightsTaken, of the version that it took last."""


class Inspect(Request[EngineStatus], frozen=True):
    """Ask an engine for its status."""

    idempotent: ClassVar[bool] = True


class StepsMeasured(Message, frozen=True):
    """What an engine's steps cost so far."""

    engine: str
    steps: tuple[float, ...]
    """Values of a planning.step_cost.StepSums, which only grow; empty where the engine does not observe its steps."""


class Measure(Request[StepsMeasured], frozen=True):
    """Ask an engine what its steps cost."""

    idempotent: ClassVar[bool] = True


class Suspend(Request[Ack], frozen=True):
    """Stop decoding between two steps; requests stay where they are."""

    idempotent: ClassVar[bool] = True


class Resume(Request[Ack], frozen=True):
    """Go on decoding after Suspend."""

    idempotent: ClassVar[bool] = True


class CachePart(Message, frozen=True):
    """Bytes of a KV cache, as actors.engines.engine.Cache has it, from the asked offset on; none where it is gone."""

    data: Buffer
    size_bytes: int = 0
    """Of the whole cache."""
    version: int = -1
    shape: tuple[int, ...] = ()
    dtype: str = ""


class FetchCache(Request[CachePart], frozen=True):
    """Engine → engine: give me the next part of this request's KV cache. With the last one it is forgotten."""

    idempotent: ClassVar[bool] = False
    request_id: str
    epoch: int = 0
    """Of the move that it is kept for; 0 where the request was handed over."""
    offset: int = 0
