from collections import Counter
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rubato.planning.prompts import Epochs, shuffled
from rubato.planning.tail import TailRound, TailRules, TailState, begin, close, drop, reopen, replace, resumed, train, trainable

RULES = st.builds(
    TailRules,
    prompts=st.integers(1, 9),
    responses=st.integers(1, 4),
    eta_prompts=st.sampled_from((1.0, 1.125, 1.25, 1.5, 2.0, 3.0)),
    eta_responses=st.sampled_from((1.0, 1.25, 1.5)),
    alpha=st.integers(0, 3),
)


def play(rules: TailRules, total: int, seed: int, *, restarts: bool) -> tuple[list[TailRound], list[int], TailState]:
    """Random order of begin, close and train until nothing is left; `restarts` loses what was not trained, now and then."""
    chance = Random(seed)
    state, rounds, trained = TailState(total), [], []
    groups: dict[int, list[int]] = {}
    for _ in range(400 * (total + 1)):
        old = state
        state, round_ = begin(state, rules)
        if round_ is not None:
            assert round_.why.startswith(round_.kind)
            rounds.append(round_)
        running = [r for r in state.rounds if r.number not in state.closed]
        ready = trainable(state, rules)
        if running and (not ready or chance.random() < 0.5):
            done = chance.choice(running)
            groups[done.number] = chance.sample(done.prompts, done.groups)
            state = close(state, done.number, groups[done.number])
        elif ready:
            number = chance.choice(ready)
            version = next(r.version for r in state.rounds if r.number == number)
            assert state.trained - version <= rules.alpha
            state = train(state, number)
            trained += groups.pop(number)
        if restarts and chance.random() < 0.1:
            state = resumed(state)
        if old == state and not state.rounds:
            return rounds, trained, state
    raise AssertionError("it never ends")


@given(RULES, st.integers(0, 60), st.integers(0, 1000), st.booleans())
def test_every_prompt_is_trained_exactly_once(rules: TailRules, total: int, seed: int, restarts: bool) -> None:
    _, trained, state = play(rules, total, seed, restarts=restarts)

    assert sorted(trained) == list(range(total))
    assert state.trained == -(-total // rules.prompts)  # as many updates as without tail batching


@given(RULES, st.integers(1, 12), st.integers(1, 3), st.integers(0, 100))
def test_every_row_is_trained_once_per_epoch(rules: TailRules, rows: int, epochs: int, seed: int) -> None:
    order = Epochs(lambda epoch: shuffled(rows, seed, epoch))

    _, trained, _ = play(rules, rows * epochs, seed, restarts=True)

    assert Counter(map(order.row, trained)) == dict.fromkeys(range(rows), epochs)


@given(RULES, st.integers(1, 40), st.integers(0, 1000), st.integers(1, 5))
def test_another_prompt_takes_the_place_of_each_that_cannot_be_trained(rules: TailRules, total: int, seed: int, failures: int) -> None:
    chance, state, trained, failed = Random(seed), TailState(total), list[int](), list[int]()
    while True:
        state, _ = begin(state, rules)
        if not state.rounds:
            break
        number = state.rounds[0].number
        if len(failed) < failures:
            failed.append(chance.choice(state.rounds[0].prompts))
            state, _ = replace(state, number, failed[-1])
        if number not in state.closed:
            prompts = state.rounds[0].prompts
            state = close(state, number, chance.sample(prompts, state.rounds[0].groups))
        if len(failed) < failures and chance.random() < 0.5:
            state = reopen(state, number)
            continue
        trained += state.rounds[0].prompts
        state = train(state, number)

    assert sorted(trained + failed) == list(range(total + len(failed)))


def test_a_prompt_that_ended_by_itself_does_not_wait() -> None:
    state, first = begin(TailState(), TailRules(4, 2))
    assert first is not None

    assert close(state, 0, first.prompts[:4], ended=[first.prompts[4]]).waiting == ()
    assert drop(state, 0) == state._replace(rounds=())
    with pytest.raises(ValueError, match="prompt 9 is not in round 0"):
        replace(state, 0, 9)


def test_rounds_that_a_restart_left_without_an_order_are_trained_oldest_first() -> None:
    rules, rounds = TailRules(1, 1, alpha=1), [TailRound(n, "short", (n,), 1, 1, 1, 4 + n % 2, "") for n in range(3)]
    state = TailState(rounds=tuple(rounds), closed=frozenset({0, 1}), trained=6)

    assert trainable(state, rules) == ()
    assert trainable(state._replace(closed=frozenset({0, 1, 2})), rules) == (0,)


@given(RULES, st.integers(0, 60), st.integers(0, 1000))
def test_the_same_state_gives_the_same_round(rules: TailRules, total: int, seed: int) -> None:
    assert play(rules, total, seed, restarts=True) == play(rules, total, seed, restarts=True)


@given(RULES, st.integers(1, 60), st.integers(0, 1000))
def test_a_long_round_does_not_speculate(rules: TailRules, total: int, seed: int) -> None:
    rounds, _, _ = play(rules, total, seed, restarts=False)

    for round_ in rounds:
        if round_.kind == "long":
            assert (len(round_.prompts), round_.launch) == (round_.groups, rules.responses)


def test_four_short_rounds_then_a_long_one() -> None:
    rules, state, kinds = TailRules(128, 8), TailState(), []
    for _ in range(10):
        state, round_ = begin(state, rules)
        assert round_ is not None
        kinds.append(round_.kind)
        state = train(close(state, round_.number, round_.prompts[-128:]), round_.number)

    assert kinds == (["short"] * 4 + ["long"]) * 2


def test_only_one_round_is_under_way_on_policy() -> None:
    state, first = begin(TailState(), TailRules(4, 2))
    assert first is not None

    assert begin(state, TailRules(4, 2))[1] is None
    assert begin(close(state, 0, first.prompts[:4]), TailRules(4, 2))[1] is None  # it is not trained yet


def test_a_short_round_overtakes_another_within_alpha() -> None:
    rules = TailRules(2, 1, alpha=1)
    state, first = begin(TailState(), rules)
    state, second = begin(state, rules)
    assert first is not None
    assert second is not None
    state = close(state, second.number, second.prompts[:2])

    assert trainable(state, rules) == (second.number,)
    state = train(state, second.number)
    state, third = begin(state, rules)
    assert third is not None
    state = close(state, third.number, third.prompts[:2])
    assert trainable(state, rules) == ()  # another update and the first would be two versions old


@pytest.mark.parametrize(
    ("rules", "named"),
    [
        (TailRules(4, 2, eta_prompts=0.9), "eta_prompts is 0.9"),
        (TailRules(4, 2, eta_responses=0.5), "eta_responses is 0.5"),
        (TailRules(4, 2, eta_prompts=float("nan")), "eta_prompts is nan"),
        (TailRules(0, 2), "prompts is 0"),
        (TailRules(4, 2, alpha=-1), "alpha is -1"),
    ],
)
def test_rules_that_make_no_sense_are_one_sentence(rules: TailRules, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        rules.checked()


def test_a_round_that_is_not_under_way_is_refused() -> None:
    state, round_ = begin(TailState(), TailRules(4, 2))
    assert round_ is not None

    with pytest.raises(ValueError, match="not generated"):
        train(state, 0)
    with pytest.raises(ValueError, match="must train 4"):
        close(state, 0, round_.prompts[:3])
    with pytest.raises(ValueError, match="not under way"):
        close(state, 1, ())
