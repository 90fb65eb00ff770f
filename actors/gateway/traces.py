"""What verifiers' EnvServer sends of an episode: deltas of its traces, then a reply; and what is believed of it.

The tokens that are trained are those that the job's own recorder kept. A trace says which of them led to its reward; one that has others
is refused.
"""

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from rubato.actors.envs.chat import TOKEN_BYTES, Transcript
from rubato.actors.envs.recorder import GaveUp
from rubato.actors.gateway.dialect import UNREADABLE
from rubato.actors.gateway.forest import Forest, Turn
from rubato.actors.messages.samples import flaw_of_reward
from rubato.bus.message import pack_f32, pack_i32
from rubato.runtime.pool.values import clean

MOST_BYTES = 256 * 2**20
"""Of all messages of one episode."""

MOST_TRACES, MOST_NODES = 256, 16_384
"""Of one episode."""

LIMITS = ("max_turns", "max_input_tokens", "max_output_tokens", "max_total_tokens")
"""Stop conditions that are limits of ours or the taskset's, and not the end of the task."""


class Node(msgspec.Struct):
    """A message, with the tokens that it adds to those of its parent."""

    parent: int | None = None
    sampled: bool = False
    token_ids: list[int] = []
    mask: list[bool] = []
    logprobs: list[float] = []


class Score(msgspec.Struct):
    """One reward."""

    score: float
    weight: float = 1.0


class Flaw(msgspec.Struct):
    """What went wrong."""

    type: str
    message: str = ""
    status_code: int | None = None


class Seat(msgspec.Struct):
    """The agent of a trace."""

    trainable: bool = True


class State(msgspec.Struct):
    """Of a trace, what is sent whole whenever it changes."""

    agent: Seat | None = None
    rewards: dict[str, Score | None] | None = None
    metrics: dict[str, float | None] | None = None
    ok: bool | None = None
    is_timeout: bool | None = None
    stop_condition: str | None = None


class Delta(msgspec.Struct):
    """What is new of one trace."""

    trace: str
    discard: bool = False
    nodes: list[Node] = []
    errors: list[Flaw] = []
    set: State = msgspec.field(default_factory=State)


class Summary(msgspec.Struct):
    """A trace that is over."""

    id: str
    nodes: int


class Head(msgspec.Struct):
    """The episode beside its traces."""

    ok: bool = False
    errors: list[Flaw] = []


class Reply(msgspec.Struct):
    """The end of an episode."""

    success: bool = True
    error: str | None = None
    head: Head | None = None
    traces: list[Summary] = []


class Trace:
    """One trace while it grows."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.errors: list[Flaw] = []
        self.state = State()

    def grow(self, delta: Delta) -> None:
        """Take in what is new."""
        self.nodes += delta.nodes
        self.errors += delta.errors
        for name in State.__struct_fields__:
            if (value := getattr(delta.set, name)) is not None:
                setattr(self.state, name, value)
        if len(self.nodes) > MOST_NODES:
            raise wrong(f"a trace of more than {MOST_NODES:,} messages")

    @property
    def reward(self) -> float:
        """Raises GaveUp where it is no number."""
        rewards = {name: score for name, score in (self.state.rewards or {}).items() if score is not None}
        for name, score in rewards.items():
            if flaw := flaw_of_reward(score.score * score.weight):
                raise wrong(f"a reward {name} of {score.score}, which is {flaw.replace('_', ' ')}")
        total = sum(score.score * score.weight for score in rewards.values())
        if flaw := flaw_of_reward(total):
            raise wrong(f"rewards whose sum {total} is {flaw.replace('_', ' ')}")
        return total

    @property
    def info(self) -> Mapping[str, float]:
        """Rewards and metrics by their names."""
        rewards = {name: score.score for name, score in (self.state.rewards or {}).items() if score is not None}
        return rewards | {name: value for name, value in (self.state.metrics or {}).items() if value is not None}

    @property
    def truncated(self) -> bool:
        """Whether a limit ended it."""
        return self.state.stop_condition in LIMITS

    def kept_in(self, forest: Forest) -> list[Transcript]:
        """The transcripts that have its sampled turns. Raises GaveUp where it has other tokens than were sampled here."""
        return list(dict.fromkeys(self._turn(number, forest).transcript for number, node in enumerate(self.nodes) if node.sampled))

    def _turn(self, number: int, forest: Forest) -> Turn:
        node, tokens = self.nodes[number], self._tokens(number)
        turn = forest.place_tokens(tokens).before
        if turn is None or turn.end * TOKEN_BYTES != len(tokens):
            raise wrong("tokens that this job did not sample: they are not trained")
        sampled = turn.end - turn.begin
        if node.mask != [False] * (len(node.mask) - sampled) + [True] * sampled or len(node.mask) != len(node.token_ids):
            raise wrong("a mask that is not of the tokens that were sampled")
        if pack_f32(node.logprobs) != turn.transcript.segment().logprobs[turn.begin * TOKEN_BYTES : turn.end * TOKEN_BYTES]:
            raise wrong("log-probabilities that are not those that were sampled with")
        return turn

    def _tokens(self, number: int) -> bytes:
        """int32 ids up to the end of that node."""
        path: list[Sequence[int]] = []
        at: int | None = number
        while at is not None:
            node = self.nodes[at]
            path.append(node.token_ids)
            if node.parent is not None and not 0 <= node.parent < at:
                raise wrong(f"a trace whose message {at} follows the message {node.parent}")
            at = node.parent
        try:
            return b"".join(map(pack_i32, reversed(path)))
        except (OverflowError, ValueError) as error:
            raise wrong(f"token ids that are none: {error}") from error


_delta, _reply = msgspec.msgpack.Decoder(Delta), msgspec.msgpack.Decoder(Reply)


class Episode:
    """One run of a task while it is played."""

    def __init__(self) -> None:
        self._traces: dict[str, Trace] = {}
        self._num_bytes = 0

    def grow(self, message: bytes | memoryview) -> None:
        """Take a delta in. Raises GaveUp for what is none."""
        self._weigh(message)
        try:
            delta = _delta.decode(message)
        except UNREADABLE as error:
            raise wrong(f"a message that is no delta of a trace: {error}") from error
        if delta.discard:
            self._traces.pop(delta.trace, None)
            return
        if len(self._traces) >= MOST_TRACES:
            raise wrong(f"an episode of more than {MOST_TRACES} traces")
        self._traces.setdefault(delta.trace, Trace()).grow(delta)

    def end(self, message: bytes | memoryview) -> Trace:
        """Its one trace, by the reply that ends it. Raises GaveUp where the episode failed, or has not one."""
        self._weigh(message)
        try:
            reply = _reply.decode(message)
        except UNREADABLE as error:
            raise wrong(f"a reply that is none: {error}") from error
        if not reply.success or reply.head is None:
            raise GaveUp("env_step_failed", f"verifiers' EnvServer refused the episode: {clean(reply.error or 'it gave no reason')}")
        found = [self._whole(summary) for summary in reply.traces]
        trained = [trace for trace in found if trace.state.agent is None or trace.state.agent.trainable]
        for trace in found:
            _check_ok(trace.state.ok, trace.errors, timed_out=bool(trace.state.is_timeout))
        _check_ok(reply.head.ok, reply.head.errors)
        if len(trained) != 1:
            raise wrong(f"an episode of {len(trained)} agents' traces: one alone can be trained")
        return trained[0]

    def _whole(self, summary: Summary) -> Trace:
        trace = self._traces.get(summary.id)
        if trace is None or len(trace.nodes) != summary.nodes:
            raise wrong(f"{len(trace.nodes) if trace else 0} of the {summary.nodes} messages of a trace")
        return trace

    def _weigh(self, message: bytes | memoryview) -> None:
        self._num_bytes += len(message)
        if self._num_bytes > MOST_BYTES:
            raise wrong(f"an episode of more than {MOST_BYTES:,} bytes")


def _check_ok(ok: bool | None, errors: Iterable[Flaw], *, timed_out: bool = False) -> None:
    """Raises GaveUp where it is not: of a model that did not answer the rollout may be tried again."""
    if ok:
        return
    last = next(reversed([*errors]), Flaw("Error", "it gave no reason"))
    said = clean(f"{last.type}: {last.message[:2000]}")
    if last.type == "ProviderError" and (last.status_code or 500) >= 500:
        raise GaveUp("generation_failed", said, retry=True)
    raise GaveUp("env_timeout" if timed_out else "env_step_failed", said)


def wrong(what: str) -> GaveUp:
    """For what an EnvServer may not send."""
    return GaveUp("env_bad_result", f"verifiers' EnvServer sent {what}")
