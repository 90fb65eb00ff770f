"""Whether trajectories hold just what engines sampled for them, and what agents from outside were told."""

from collections import Counter
from collections.abc import Callable, Iterator
from typing import NamedTuple

from rubato.actors.envs.chat import TOKEN_BYTES
from rubato.actors.gateway.session import public_name
from rubato.actors.messages.generation import Generate, Tokens
from rubato.actors.messages.samples import Score, Segment, Ticket, Trajectory
from rubato.bus.message import unpack_i32


class Told(NamedTuple):
    """A turn as its agent was told, in int32 ids."""

    prompt: bytes
    ids: bytes


class Expected(NamedTuple):
    """What an agent knows of the trajectory of a session that it says is complete."""

    path: tuple[tuple[Told, ...], ...]
    """Of each turn that led to the last one, in turn: what it was, or, of turns with one and the same text, what each was."""
    side: tuple[Told, ...] = ()
    """Turns that led to nothing."""
    reward: float | None = None


class TokenChecks:
    """`fail` hears of an invariant that is broken, and how."""

    def __init__(self, fail: Callable[[str, str], None]) -> None:
        self._fail = fail
        self._sampled: dict[str, dict[tuple[bytes, bytes, bytes], set[str]]] = {}
        """Trajectory → prompt, ids and log-probabilities of a turn → the requests that an engine sampled so."""
        self._tickets: dict[str, tuple[str, int]] = {}
        """Session → trajectory and attempt."""
        self._expected: dict[tuple[str, int], dict[str, Expected | None]] = {}
        """Of an attempt's sessions, of which it has several where a Store forgot that it was given out; None where an agent knows too little."""
        self._scored: dict[str, set[int]] = {}
        """Attempt, or attempt and session → numbers of turns that were scored."""

    def sampled(self, request: Generate, tokens: Tokens) -> None:
        """An engine has `tokens`, which may be all."""
        ids, sampling = unpack_i32(tokens.ids), request.sampling
        if len(ids) == sampling.max_new_tokens or (ids and ids[-1] in sampling.stop_token_ids):
            turn, _, _ = request.request_id.partition("r")
            self._sampled.setdefault(request.session, {}).setdefault((request.prompt, tokens.ids, tokens.logprobs), set()).add(turn)

    def opened(self, session: str, ticket: Ticket) -> None:
        """A session began."""
        attempt = self._tickets[session] = ticket.trajectory_id, ticket.attempt
        self._expected.setdefault(attempt, {})[session] = None

    def completes(self, session: str, expected: Expected) -> None:
        """Its agent is about to say that it is complete."""
        self._expected[self._tickets[session]][session] = expected

    def scored(self, request: Score) -> None:
        """The reward service is asked for scores of this."""
        self._scored.setdefault(request.trajectory_id, set()).add(len(request.completions))

    def stored(self, trajectory: Trajectory) -> None:
        """The sample buffer takes it in."""
        ticket = trajectory.ticket
        self._check_sampled(trajectory)
        self._check_scored(trajectory)
        expected = self._expected.get((ticket.trajectory_id, ticket.attempt), {})
        flaws = [_flaw_of(trajectory, each) if each else "" for each in expected.values()]
        if flaws and all(flaws):
            self._fail("trained as told", f"{ticket.trajectory_id}, attempt {ticket.attempt}: {flaws[0]}")

    def _check_sampled(self, trajectory: Trajectory) -> None:
        name = trajectory.ticket.trajectory_id
        known = self._sampled.get(name, {})
        turns = Counter(turn for segment in trajectory.segments for turn in _turns_of(segment))
        for (prompt, ids, logprobs), num in turns.items():
            if num > len(known.get((prompt, ids, logprobs), ())):
                text = f"{name} has {ids.hex(' ', 4)} behind {prompt.hex(' ', 4)} {num} times, more often than it was sampled"
                self._fail("tokens as sampled", text)
        if (num := turns.total()) > trajectory.turns:  # those of side requests are counted, and are in no segment
            self._fail("tokens as sampled", f"{name} says that it has {trajectory.turns} turns, and has {num}")

    def _check_scored(self, trajectory: Trajectory) -> None:
        ticket = trajectory.ticket
        attempt = f"{ticket.trajectory_id}.{ticket.attempt}"
        sessions = self._expected.get((ticket.trajectory_id, ticket.attempt), ())
        scored = [
            num for key in (attempt, *(f"{attempt}.{public_name(session)}" for session in sessions)) for num in self._scored.get(key, ())
        ]
        if self._scored and trajectory.turns not in scored:
            self._fail("scored as trained", f"{attempt} has {trajectory.turns} turns; scored were {scored}")


def _turns_of(segment: Segment) -> Iterator[tuple[bytes, bytes, bytes]]:
    """(what was before it, its ids, their log-probabilities) of each sampled turn. Something was shown between any two."""
    begin = segment.mask.find(1)
    while begin >= 0:
        end = segment.mask.find(0, begin)
        end = len(segment.mask) if end < 0 else end
        at = slice(begin * TOKEN_BYTES, end * TOKEN_BYTES)
        yield segment.tokens[: at.start], segment.tokens[at], segment.logprobs[at]
        begin = segment.mask.find(1, end)


def _flaw_of(trajectory: Trajectory, expected: Expected) -> str:
    """What is not as its agent was told; empty where all is."""
    turns = {Told(prompt, ids) for segment in trajectory.segments for prompt, ids, _ in _turns_of(segment)}
    for number, choices in enumerate(expected.path, 1):
        if turns.isdisjoint(choices):
            return f"turn {number} of {len(expected.path)} that led to the end is not trained"
    if found := next((turn for turn in expected.side if turn in turns), None):
        return f"a side request is trained: {found.ids.hex(' ', 4)} behind {found.prompt.hex(' ', 4)}"
    if expected.reward is not None and trajectory.scores.get("env") != expected.reward:
        return f"its agent's reward was {expected.reward}; it has {dict(trajectory.scores)}"
    return ""
