"""RollPacker's tail batching: short rounds that go on without the slowest prompts, and long rounds that train those.

A short round launches eta times as many prompts as a batch needs, and eta times as many responses of each as a group needs; the
first groups that are complete are trained, and the other prompts wait. As soon as a whole batch of them waits, a long round takes
them without speculation (RollPacker, arXiv 2509.21009, section 4.1). Nothing of an aborted response is trained.

Beyond the paper: several rounds may be under way where samples may be `alpha` versions old; a response may be a trajectory of any
number of turns, and one that failed is replaced; and a data set may end.
"""

import math
from collections.abc import Collection, Iterable
from typing import Literal, NamedTuple

Kind = Literal["short", "long"]


class TailRules(NamedTuple):
    """The batch: `prompts` groups of `responses` each; how much more of both a short round launches."""

    prompts: int
    responses: int
    eta_prompts: float = 1.25
    eta_responses: float = 1.25
    alpha: int = 0
    """Versions that a sample may be old when it is trained."""

    def checked(self) -> "TailRules":
        """Itself. Raises ValueError for a batch of nothing, eta below 1, or alpha below 0."""
        for name, value in (("prompts", self.prompts), ("responses", self.responses)):
            if value < 1:
                raise ValueError(f"{name} is {value}; a batch needs at least 1")
        for name, eta in (("eta_prompts", self.eta_prompts), ("eta_responses", self.eta_responses)):
            if not 1 <= eta < math.inf:
                raise ValueError(f"{name} is {eta:g}; it must be 1 (no speculation) or more")
        if self.alpha < 0:
            raise ValueError(f"alpha is {self.alpha}; it must be 0 or more")
        return self


class TailRound(NamedTuple):
    """Launch `launch` responses of each of `prompts`; train the first `responses` of the first `groups` prompts that have them."""

    number: int
    kind: Kind
    prompts: tuple[int, ...]
    launch: int
    groups: int
    responses: int
    version: int
    """Of the weights when it began; its samples may be trained up to alpha updates later."""
    why: str


class TailState(NamedTuple):
    """All that a restart needs: numbers of prompts, in the order in which the data set gives them (`rubato.planning.prompts`)."""

    total: int | None = None
    """Prompts of all epochs together; None never ends."""
    fresh: int = 0
    """The next that was never launched."""
    again: tuple[int, ...] = ()
    """Launched by rounds that a restart undid: they come before fresh ones."""
    waiting: tuple[int, ...] = ()
    """Put off by short rounds, the oldest first."""
    rounds: tuple[TailRound, ...] = ()
    """Begun and not trained yet; those that are generated name only the prompts to train."""
    closed: frozenset[int] = frozenset()
    """Those of them that are generated."""
    begun: int = 0
    trained: int = 0
    """Updates so far, which is the version of the weights."""


def begin(state: TailState, rules: TailRules) -> tuple[TailState, TailRound | None]:
    """The next round, or None: alpha forbids it, nothing is left, or what is left depends on how rounds under way end."""
    left = math.inf if state.total is None else len(state.again) + state.total - state.fresh
    launched = math.ceil(rules.eta_prompts * rules.prompts)
    if not _in_time(state.trained, [*(r.version for r in state.rounds), state.trained], rules.alpha):
        return state, None
    if len(state.waiting) < rules.prompts and left >= launched:
        return _short(state, rules, launched)
    num = int(min(rules.prompts, len(state.waiting) + left))
    if not num or (num < rules.prompts and len(state.closed) < len(state.rounds)):
        return state, None
    return _long(state, rules, num)


def close(state: TailState, number: int, trained: Collection[int], ended: Collection[int] = ()) -> TailState:
    """Round `number` is generated, and its groups of the prompts `trained` are complete: the others wait, but for those that `ended` by
    themselves and are never trained. Raises ValueError where it can't be so."""
    round_ = _round(state, number)
    if number in state.closed:
        raise ValueError(f"round {number} is closed already")
    if len(set(trained)) != round_.groups or not set(trained) <= set(round_.prompts):
        raise ValueError(f"round {number} must train {round_.groups} of its prompts, not {sorted(trained)}")
    later = tuple(prompt for prompt in round_.prompts if prompt not in trained and prompt not in ended)
    kept = round_._replace(prompts=tuple(prompt for prompt in round_.prompts if prompt in trained))
    rounds = tuple(kept if other is round_ else other for other in state.rounds)
    return state._replace(waiting=state.waiting + later, rounds=rounds, closed=state.closed | {number})


def reopen(state: TailState, number: int) -> TailState:
    """Responses of round `number` were lost: it is generated no more. Raises ValueError where it is not under way."""
    return state._replace(closed=state.closed - {_round(state, number).number})


def replace(state: TailState, number: int, prompt: int) -> tuple[TailState, int]:
    """A `prompt` of round `number` can't be trained: returns the one that takes its place, the first of those that don't wait, beyond
    `total` where all were launched. Raises ValueError where the round has no such prompt."""
    round_ = _round(state, number)
    if prompt not in round_.prompts:
        raise ValueError(f"prompt {prompt} is not in round {number}")
    state, (other,) = _taken(reopen(state, number), 1)
    changed = round_._replace(prompts=tuple(other if each == prompt else each for each in round_.prompts))
    rounds = tuple(changed if each is round_ else each for each in state.rounds)
    return state._replace(rounds=rounds, total=None if state.total is None else state.total + 1), other


def drop(state: TailState, number: int) -> TailState:
    """Round `number` can't be trained, nor any of its prompts. Raises ValueError where it is not under way."""
    rounds = tuple(each for each in state.rounds if each is not _round(state, number))
    return state._replace(rounds=rounds, closed=state.closed - {number})


def trainable(state: TailState, rules: TailRules) -> tuple[int, ...]:
    """Generated rounds that may be trained next, such that every round under way is still trained before alpha updates have passed;
    with alpha above 0 a short round may so overtake a long one. Where all are generated and a restart left them no such order: the oldest."""
    found = tuple(
        number
        for number in sorted(state.closed)
        if _in_time(state.trained + 1, [r.version for r in state.rounds if r.number != number], rules.alpha)
    )
    if not found and len(state.closed) == len(state.rounds):
        return tuple(round_.number for round_ in sorted(state.rounds, key=lambda each: each.version)[:1])
    return found


def train(state: TailState, number: int) -> TailState:
    """Round `number` was trained: its prompts are done for their epoch. Raises ValueError unless it is generated."""
    round_ = _round(state, number)
    if number not in state.closed:
        raise ValueError(f"round {number} is not generated yet")
    rounds = tuple(other for other in state.rounds if other is not round_)
    return state._replace(rounds=rounds, closed=state.closed - {number}, trained=state.trained + 1)


def resumed(state: TailState) -> TailState:
    """The state after a restart that lost every sample that was not trained: what was to be trained is launched anew, what was put
    off still waits."""
    again = sorted(prompt for r in state.rounds if r.kind == "short" for prompt in r.prompts)
    taken = tuple(prompt for r in state.rounds if r.kind == "long" for prompt in r.prompts)
    return state._replace(again=(*again, *state.again), waiting=taken + state.waiting, rounds=(), closed=frozenset())


def _short(state: TailState, rules: TailRules, launched: int) -> tuple[TailState, TailRound]:
    why = f"short: {len(state.waiting)} of {rules.prompts} prompts wait; {launched} are launched and the first {rules.prompts} trained"
    state, prompts = _taken(state, launched)
    return _begun(state, rules, "short", prompts, rules.prompts, math.ceil(rules.eta_responses * rules.responses), why)


def _long(state: TailState, rules: TailRules, num: int) -> tuple[TailState, TailRound]:
    old = state.waiting[:num]
    why = f"long: {len(old)} prompts that short rounds put off"
    state, new = _taken(state._replace(waiting=state.waiting[num:]), num - len(old))
    if new:
        why += f" and the last {len(new)} of the data set"
    return _begun(state, rules, "long", old + new, num, rules.responses, why)


def _begun(
    state: TailState, rules: TailRules, kind: Kind, prompts: tuple[int, ...], groups: int, launch: int, why: str
) -> tuple[TailState, TailRound]:
    round_ = TailRound(state.begun, kind, prompts, launch, groups, rules.responses, state.trained, why)
    return state._replace(rounds=(*state.rounds, round_), begun=state.begun + 1), round_


def _taken(state: TailState, num: int) -> tuple[TailState, tuple[int, ...]]:
    """`num` prompts to launch: what a restart undid, then fresh ones."""
    again = state.again[:num]
    end = state.fresh + num - len(again)
    return state._replace(again=state.again[num:], fresh=end), again + tuple(range(state.fresh, end))


def _in_time(updates: int, versions: Iterable[int], alpha: int) -> bool:
    """Whether rounds begun at these versions can all be trained within alpha, one after another, the oldest first."""
    return all(updates + place - version <= alpha for place, version in enumerate(sorted(versions)))


def _round(state: TailState, number: int) -> TailRound:
    for round_ in state.rounds:
        if round_.number == number:
            return round_
    raise ValueError(f"round {number} is not under way")
